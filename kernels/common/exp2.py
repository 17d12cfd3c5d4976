# SPDX-License-Identifier: Apache-2.0
"""exp2 on two pipes: the MUFU's ``ex2.approx``, and a polynomial on the FMA pipe in pairs.

B200's MUFU does 16 exp2 a cycle and SM. At head_dim 128 that takes as long as both matrix products,
at 64 twice as long, so a share of the exponentials moves to the FMA pipe (arXiv 2603.05451).
"""

import cutlass.cute as cute
from cutlass import Float32, Int32

# 2^f on [0, 1) by degree, least relative error (Sollya's fpminimax) as published with
# FlashAttention-4: largest relative error 8.8e-5 and 3.1e-6 in float32. Degree 3 is a fortieth of
# bfloat16's half ulp, but a third of float16's: see KernelPlan.exp2_degree.
POLYNOMIALS = {
    3: (
        1.0,
        0.695146143436431884765625,
        0.227564394474029541015625,
        0.077119089663028717041015625,
    ),
    4: (
        1.0,
        0.693042695522308349609375,
        0.2412912547588348388671875,
        5.2225358784198760986328125e-2,
        1.3434938155114650726318359375e-2,
    ),
}
# 1.5 * 2^23: adding it leaves the integer part in the low mantissa bits, and its own bit pattern
# 0x4B400000 vanishes when shifted left by 23.
ROUNDING_MAGIC = 12582912.0
# Below this, 2^x has no normal float32; the polynomial path returns at most 2^-126.
LOWEST_EXPONENT = -127.0
MANTISSA_BITS = 23


def exp2_mufu(x: Float32) -> Float32:
    """2^x by ``ex2.approx.ftz.f32``: at most 2 ulp (PTX ISA 9.1 section 9.7.3.21)."""
    return cute.math.exp2(x, approx=True, ftz=True)


def exp2_polynomial(x: Float32, y: Float32, degree: int = 3) -> tuple[Float32, Float32]:
    """(2^x, 2^y) for x, y <= 127 by a polynomial of this degree in packed f32x2.

    2^x = 2^floor(x) * 2^frac(x): the fraction goes through the polynomial, the integer part is
    added to the exponent bits. Not for NaN, which the clamp drops: callers carry NaN in the row
    maximum (see ``kernels.common.softmax``).
    """
    pair = (cute.arch.fmax(x, LOWEST_EXPONENT), cute.arch.fmax(y, LOWEST_EXPONENT))
    magic = (ROUNDING_MAGIC, ROUNDING_MAGIC)
    # rounding down makes frac lie in [0, 1); the two subtractions are exact
    floor = cute.arch.add_packed_f32x2(pair, magic, rnd="rm")
    frac = cute.arch.sub_packed_f32x2(pair, cute.arch.sub_packed_f32x2(floor, magic))
    *lower, highest = POLYNOMIALS[degree]
    power = (highest, highest)
    for coefficient in reversed(lower):
        power = cute.arch.fma_packed_f32x2(power, frac, (coefficient, coefficient))
    return _scale_by_integer(power[0], floor[0]), _scale_by_integer(power[1], floor[1])


def _scale_by_integer(power: Float32, floor: Float32) -> Float32:
    """power * 2^n with n in the low bits of ``floor``: one shift and one integer addition."""
    exponent = floor.bitcast(Int32) << Int32(MANTISSA_BITS)
    return (power.bitcast(Int32) + exponent).bitcast(Float32)
