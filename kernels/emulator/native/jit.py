"""LLVM IR of the blocks -> callable host code, through llvmlite.

llvmlite is a public, versioned interface to LLVM (numba's); the DSL's own MLIR engine could do the
same but is private to it, and the emulator's core stays independent of the DSL.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm

from .builder import BlockBuilder
from .ir import I1

BlockFunction = Callable[
    [int, int, int], int
]  # (registers, active lanes, parameters) -> taken lanes
_PROTOTYPE = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p)
_lock = threading.Lock()
_machine: Any = None


def _target_machine() -> Any:
    global _machine
    if _machine is None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        target = llvm.Target.from_default_triple()
        features = llvm.get_host_cpu_features().flatten()
        _machine = target.create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=features, opt=0, codemodel="jitdefault", jit=True
        )
    return _machine


@dataclass
class NativeModule:
    """Compiled blocks by name. Keeps the engine alive."""

    functions: dict[str, BlockFunction]
    _engine: Any


def function_text(block: BlockBuilder, taken: str | None) -> str:
    """The IR of one block; ``taken`` is the branch condition, returned for the active lanes."""
    head = [
        f"define i32 @{block.name}(ptr noalias %regs, i32 %mask, ptr noalias readonly %params) #0 {{",
        f"  %lanes = bitcast i32 %mask to {I1}",
    ]
    tail = ["  ret i32 0", "}"]
    if taken is not None:
        tail = [
            f"  %taken = bitcast {I1} {taken} to i32",
            "  %taken.active = and i32 %taken, %mask",
            "  ret i32 %taken.active",
            "}",
        ]
    return "\n".join(head + block.lines + tail)


def compile_blocks(blocks: list[tuple[BlockBuilder, str | None]]) -> NativeModule:
    """Compiles all blocks of a kernel as one module."""
    helpers = {name: helper for block, _ in blocks for name, helper in block.helpers.items()}
    declares = sorted(
        set().union(
            *(block.intrinsics for block, _ in blocks), *(h.intrinsics for h in helpers.values())
        )
    )
    attributes = (
        'attributes #0 = { nounwind "prefer-vector-width"="512" "min-legal-vector-width"="512" }'
    )
    shared = [helpers[name].text for name in sorted(helpers)]
    text = "\n".join([*declares, *shared, *(function_text(*item) for item in blocks), attributes])
    with _lock:
        machine = _target_machine()
        module = llvm.parse_assembly(text)
        module.triple = machine.triple
        module.data_layout = str(machine.target_data)
        options = llvm.create_pipeline_tuning_options(speed_level=0)
        builder = llvm.create_pass_builder(machine, options)
        passes = llvm.create_new_module_pass_manager()
        passes.add_instruction_combine_pass()
        passes.add_dead_code_elimination_pass()
        passes.run(module, builder)
        engine = llvm.create_mcjit_compiler(module, _fresh_machine())
        engine.finalize_object()
        functions = {b.name: _PROTOTYPE(engine.get_function_address(b.name)) for b, _ in blocks}
    return NativeModule(functions, engine)


def _fresh_machine() -> Any:
    """An engine owns its target machine."""
    global _machine
    machine, _machine = _machine, None
    return machine
