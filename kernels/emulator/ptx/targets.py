"""Which .version and .target a module may have, what it may use, and on which GPU it runs.

PTX ISA 9.1 sections 11.1.1 to 11.1.3, and the "Target ISA Notes" of each instruction; where they
are silent, what ptxas 13.4 takes. Code for sm_80 runs on every newer GPU, for sm_90a on sm_90 alone
(a: features of one architecture), for sm_100f on sm_100 and later ones of its family (f).
"""

from __future__ import annotations

import re
from functools import cache

# The oldest .version that knows a target (PTX ISA 9.1, release notes); suffixes came with
# .version 8.0 (a) and 8.8 (f).
_OLDEST = {
    50: (4, 0), 52: (4, 1), 53: (4, 2), 60: (5, 0), 61: (5, 0), 62: (5, 0), 70: (6, 0), 72: (6, 1),
    75: (6, 3), 80: (7, 0), 86: (7, 1), 87: (7, 4), 88: (9, 0), 89: (7, 8), 90: (7, 8),
    100: (8, 6), 101: (8, 6), 103: (8, 8), 110: (9, 0), 120: (8, 7), 121: (8, 8),
}  # fmt: skip
_WITH_A, _WITH_F = 90, 100  # the first architectures with targets of their own and of families
_NEWEST_MAJOR = 9
_RE_TARGET = re.compile(r"sm_(\d+)([af]?)")

_BF16 = r"(?:\.\w+)*\.bf16(?:x2)?"
# The first row that matches an opcode counts: each word is one way to satisfy it. 90: sm_90 or
# newer; 90a: this alone; 100f: that family, with a or f.
_ROWS = (
    (r"wgmma\..*", "90a"),
    (r"tcgen05\.ld\.red\..*", "103f 110f"),
    (r"setmaxnreg\..*|tensormap\.replace\..*", "90a 100f 110f 120f"),
    (r"tcgen05\..*|.*\.cta_group::[12].*", "100f 110f"),
    (r"redux\.sync\.(?:min|max)\..*f32", "100f 110f"),
    (r"(?:ld|st)matrix\..*\.(?:m16n16|m8n16|m16n8)\..*", "100f 110f 120f"),
    (r"clusterlaunchcontrol\..*\.multicast.*", "100f 110f 120f"),
    (r"cvt\..*\.s2f6x2.*", "100a 103a 110a 120a"),
    (r"cvt\..*(?:ue8m0x2|e2m[13]x2|e3m2x2).*|cvt\..*e[45]m[32]x2\.bf16x2", "100f 110f 120f"),
    (r"clusterlaunchcontrol\..*|.*\.f32x2|(?:add|sub|fma)\.(?:.*\.)?f32\.b?f16", "100"),
    (r"(?:min|max)(?:\.ftz)?(?:\.NaN)?\.abs\.f32", "100"),
    (r"(?:ld|st)\.(?:.*\.)?(?:v8\.[busf]32|v4\.[busf]64)", "100"),
    (r".*\.shared::cluster.*|mbarrier\.arrive\..*\.shared::cta.*|barrier\.cluster\..*", "90"),
    (r"(?:mapa|getctarank|elect|stmatrix|griddepcontrol|tensormap)\..*", "90"),
    (r"cp\.async\.bulk.*|cp\.reduce\.async\.bulk.*|(?:st|red)\.async.*", "90"),
    (r"fence\.(?:proxy\.async|proxy\.tensormap|mbarrier_init).*|prefetch\.tensormap", "90"),
    (r"mbarrier\.(?:try_wait|arrive\.expect_tx|expect_tx|complete_tx).*", "90"),
    (r"(?:min|max)\.relu\.[us].*|ex2\..*bf16(?:x2)?|tanh\..*bf16(?:x2)?", "90"),
    (rf"(?:add|sub|mul|setp){_BF16}", "90"),
    (r"cvt\.(?:.*\.)?(?:bf16\.(?:[us]\d+|b?f16|f64)|(?:[us]\d+|f16|f64)\.bf16)", "90"),
    (r"(?:red|atom)\..*\.noftz.*bf16(?:x2)?|(?:red|atom)\..*\.(?:v[248]\..*|b128)", "90"),
    (r"cvt\..*e[45]m[32]x2.*|.*\.xorsign\.abs.*", "89"),
    (rf"(?:cp\.async|createpolicy|discard|applypriority|mbarrier|redux)\..*|.*{_BF16}.*", "80"),
    (r"(?:min|max)(?:\.ftz)?\.NaN\..*|(?:min|max)\..*f16(?:x2)?|fma\..*\.relu\..*", "80"),
    (r"cvt\..*\.relu\..*|cvt\.r[nz]\.f16x2\.f32|mma\..*m16n8k(?:16|32|4)\..*", "80"),
    (r"prefetch\..*L2::evict.*", "80"),
)  # fmt: skip
_PATTERNS = [(re.compile(pattern), ways.split()) for pattern, ways in _ROWS]
_PLAIN = ["50"]


@cache
def needs(op: str) -> list[str]:
    """The ways to satisfy what an opcode needs of a target."""
    for pattern, ways in _PATTERNS:
        if pattern.fullmatch(op) is not None:
            return ways
    return _PLAIN


def _name(way: str) -> str:
    return f"sm_{way}" + (" or newer" if way.isdigit() else "")


@cache
def lacking(op: str, target: str, operands: int = 0) -> str | None:
    """What a target lacks for an opcode with so many operands, or None."""
    m = _RE_TARGET.fullmatch(target)
    ways = needs(op)
    if re.fullmatch(r"(?:min|max)(?:\.ftz)?(?:\.NaN)?\.f32", op) and operands == 4:
        ways = ["100"]
    if m is None or any(_satisfies(int(m[1]), m[2], way) for way in ways):
        return None
    return f"{op} needs .target {', '.join(map(_name, ways))}, not {target}"


def _satisfies(number: int, suffix: str, way: str) -> bool:
    if way.isdigit():
        return number >= int(way)
    wanted = int(way[:-1])
    if way.endswith("a"):
        return number == wanted and suffix == "a"
    return number // 10 == wanted // 10 and number >= wanted and suffix != ""


def bad_settings(version: str, target: str, address_bits: int) -> tuple[str, str] | None:
    """The directive that is wrong in a module's head, and why; or None."""
    major, minor = (int(part) for part in version.split("."))
    if not 1 <= major <= _NEWEST_MAJOR:
        return ".version", f"there is no PTX {version}; the newest known is {_NEWEST_MAJOR}.x"
    m = _RE_TARGET.fullmatch(target.split(",")[0].strip())
    if m is None or int(m[1]) not in _OLDEST:
        return ".target", f"{target} is no architecture that is known"
    number, suffix = int(m[1]), m[2]
    first = {"": 0, "a": _WITH_A, "f": _WITH_F}[suffix]
    if number < first:
        return ".target", f"there is no sm_{number}{suffix}"
    oldest = max(_OLDEST[number], {"": (0, 0), "a": (8, 0), "f": (8, 8)}[suffix])
    if (major, minor) < oldest:
        return ".target", f"{target} came with PTX {oldest[0]}.{oldest[1]}, not with {version}"
    if address_bits != 64:
        return ".address_size", "kernels with 32-bit addresses do not run on sm_90 or newer"
    return None


def why_not_on(target: str, arch: str) -> str | None:
    """Why code for ``target`` does not run on a GPU of ``arch`` (such as sm_100a), or None."""
    code, gpu = (_RE_TARGET.match(name) for name in (target, arch))
    if code is None or gpu is None:
        raise ValueError(f"{target!r} or {arch!r} is no architecture")
    number, suffix, own = int(code[1]), code[2], int(gpu[1])
    if suffix == "a" and number != own:
        return f"code for {target} runs on sm_{number} alone"
    if suffix == "f" and (number // 10 != own // 10 or number > own):
        return f"code for {target} runs on the family of sm_{number} alone"
    return f"code for {target} needs a newer GPU" if number > own else None
