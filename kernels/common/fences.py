"""The two tcgen05 fences that order tensor-core work across threads.

``tcgen05.mma``, ``.ld`` and ``.st`` are asynchronous: program order and a barrier do not order
them by themselves. PTX ISA 9.1 section 9.7.16.6 asks for a fence on each side of the
synchronisation that hands tensor memory from one thread to another:

    producer: tcgen05.ld; tcgen05.wait::ld; fence_before_thread_sync; arrive
    consumer: wait; fence_after_thread_sync; tcgen05.mma

``tcgen05.commit`` performs the first one implicitly; the waiter still needs the second.
CuTe DSL exposes neither in ``cute.arch`` (4.8.1).
"""

from cutlass.cutlass_dsl import dsl_user_op
from cutlass.experimental import primitives

# dsl_user_op gives these the line of their caller, which is what a report should point to.


@dsl_user_op
def fence_before_thread_sync(*, loc=None, ip=None) -> None:
    """Orders this thread's earlier tcgen05 operations before its next arrive or barrier."""
    primitives.tcgen05_fence(primitives.Tcgen05Fence.BEFORE_THREAD_SYNC, loc=loc, ip=ip)


@dsl_user_op
def fence_after_thread_sync(*, loc=None, ip=None) -> None:
    """Orders this thread's later tcgen05 operations after the wait or barrier it just passed."""
    primitives.tcgen05_fence(primitives.Tcgen05Fence.AFTER_THREAD_SYNC, loc=loc, ip=ip)
