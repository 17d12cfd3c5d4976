"""Record what a real GPU's TMA does, for test_tma_hardware.py to hold the emulator against.

    python tests/emulator/hardware/record_tma.py tests/emulator/hardware/tma_sm90.json

Needs a Hopper or newer GPU and its driver, nothing else: tensor maps come from the driver's
cuTensorMapEncodeTiled, kernels are PTX text that the driver compiles. Three sets are recorded:

    encode  parameters -> the 64 defined bytes of the CUtensorMap
    load    parameters, coordinates, SMEM address -> SHA-256 of SMEM after the load
    store   parameters, coordinates, SMEM address -> SHA-256 of global memory after the store

Data are pseudo-random bytes that `pattern` makes again from a seed.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import multiprocessing
import random
import sys
from typing import Any

SMEM_DUMP_BYTES = 32768
SMEM_FILL = 0xA5
SMEM_WORD_FACTOR = 2654435761  # SMEM word i is i * this before a store
DTYPE_BYTES = [1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4]  # by CUtensorMapDataType
UINT8, FLOAT16, BFLOAT16, TFLOAT32 = 0, 6, 9, 11


def pattern(nbytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


# --- cases ---------------------------------------------------------------------------------------


def case(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "dtype": BFLOAT16,
        "address": 0,  # offset from a 256-byte aligned base
        "dims": [72, 40],
        "strides": [160],  # bytes, of dims 1..
        "box": [24, 16],
        "element_strides": [1, 1],
        "interleave": 0,
        "swizzle": 0,
        "l2": 0,
        "oob": 0,
    }
    base.update(changes)
    base["element_strides"] = base["element_strides"][:1] + [1] * (len(base["dims"]) - 1)
    if "element_strides" in changes:
        base["element_strides"] = changes["element_strides"]
    return base


def encode_cases() -> list[dict[str, Any]]:
    cases = [case()]
    for dtype, size in enumerate(DTYPE_BYTES):
        cases.append(case(dtype=dtype, dims=[64, 40], strides=[64 * size], box=[16, 8]))
        if dtype >= FLOAT16:
            cases.append(case(dtype=dtype, dims=[64, 40], strides=[64 * size], box=[16, 8], oob=1))
    cases += [case(swizzle=s, box=[16, 16]) for s in range(4)]
    cases += [case(l2=p) for p in range(4)]
    cases += [case(oob=o) for o in range(2)]
    cases += [case(element_strides=[1, e]) for e in range(1, 9)]
    for interleave in range(3):
        for swizzle in (0, 1):
            cases.append(
                case(
                    interleave=interleave,
                    swizzle=swizzle,
                    dims=[16, 40, 8],
                    strides=[32, 32 * 40],
                    box=[16, 8, 2],
                    element_strides=[1, 1, 1],
                )
            )
    cases += [case(address=a) for a in (16, 32, 1 << 20)]
    ranks = [[512], [72, 40], [72, 40, 5], [72, 40, 5, 3], [72, 40, 5, 3, 2]]
    for dims in ranks:
        strides, total = [], 80 * 2
        for extent in dims[1:]:
            strides.append(total)
            total *= extent + 1
        for box0 in (8, 64):
            box = [box0, 16, 4, 2, 2][: len(dims)]
            cases.append(case(dims=dims, strides=strides, box=box))
            estrides = [1, 2, 3, 4, 5][: len(dims)]
            cases.append(case(dims=dims, strides=strides, box=box, element_strides=estrides))
    for rows in (818, 819, 820, 1 << 20, 1 << 31):
        cases.append(case(dims=[72, rows], strides=[160]))
    for stride in (160, 1 << 20, 1 << 36, (1 << 36) + 160, (1 << 39) + (1 << 37)):
        cases.append(case(strides=[stride]))
        cases.append(case(dims=[72, 40, 4], strides=[160, stride], box=[24, 16, 1]))
        cases.append(case(dims=[72, 40, 2, 4], strides=[160, 6400, stride], box=[24, 16, 1, 1]))
        cases.append(
            case(dims=[72, 40, 2, 2, 4], strides=[160, 6400, 12800, stride], box=[24, 16, 1, 1, 1])
        )
    cases += [case(box=[b, 256]) for b in (8, 120, 256)]
    cases += [case(dims=[1 << 32, 4], strides=[1 << 33], box=[8, 4])]
    return cases


def transfer_cases(kind: str) -> list[dict[str, Any]]:
    """Loads or stores; "coords" innermost first, "smem" the offset from a 1024-byte boundary."""
    rng = random.Random(11)
    cases: list[dict[str, Any]] = []
    wide = {"dims": [128, 96], "strides": [256]}

    def add(coords: list[int], smem: int = 0, **changes: Any) -> None:
        cases.append({**case(**changes), "coords": coords, "smem": smem})

    for swizzle, inner in ((0, 64), (1, 16), (2, 32), (3, 64)):
        for smem in (0, 128, 256, 640, 1024):
            add([8, 3], smem, **wide, box=[inner, 32], swizzle=swizzle)
        add([0, 0], 0, **wide, box=[inner, 64], swizzle=swizzle)
        for short in (8, 16, 24, 32, 48):  # rows shorter than the swizzle's span
            if short < inner:
                add([0, 0], 0, **wide, box=[short, 24], swizzle=swizzle)
                add([16, 5], 384, **wide, box=[short, 13], swizzle=swizzle)
    sides = [[96, 0], [0, 90], [120, 95], [128, 0], [0, 96], [1 << 20, 0]]
    if kind == "load":
        sides += [[-8, 0], [0, -5], [-16, -3], [-64, 0], [0, -32], [-(1 << 20), -(1 << 20)]]
    for oob in (0, 1):  # every side out of bounds, and wholly outside
        for coords in sides:
            add(coords, 0, **wide, box=[32, 32], oob=oob)
            add(coords, 0, **wide, box=[64, 32], swizzle=3, oob=oob)
    for dtype, size in enumerate(DTYPE_BYTES):
        for oob in (0, 1) if dtype >= FLOAT16 else (0,):
            add([16, 2], 0, dtype=dtype, dims=[48, 20], strides=[48 * size], box=[48, 24], oob=oob)
    for estrides, box in (([1, 2], [32, 32]), ([1, 3], [32, 32]), ([1, 8], [32, 64]),
                          ([1, 2], [64, 31])):  # fmt: skip
        for coords in ([0, 0], [8, 5], [104, 80], [0, 94], [0, -7]):
            if kind == "load" or min(coords) >= 0:
                add(coords, 0, **wide, box=box, element_strides=estrides)
    for dims in ([512], [72, 40], [72, 12, 5], [40, 6, 5, 3], [24, 6, 5, 3, 2]):
        strides, total = [], (dims[0] + 8) * 2
        for extent in dims[1:]:
            strides.append(total)
            total *= extent + 1
        box = [16, 8, 4, 2, 2][: len(dims)]
        for _ in range(6):
            low = -4 if kind == "load" else 0
            coords = [rng.randint(low, extent) for extent in dims]
            coords[0] &= ~7
            for swizzle in (0, 1):
                smem = 128 * rng.randint(0, 8)
                add(coords, smem, dims=dims, strides=strides, box=box, swizzle=swizzle)
    # Illegal instructions on hardware: few, for each costs the process.
    add([100, 0], 0, **wide, box=[32, 32])
    add([4, 0], 0, dtype=UINT8, dims=[128, 96], strides=[128], box=[32, 32])
    if kind == "store":
        for coords in ([-8, 0], [0, -5], [-8, -4, 0]):
            dims = [128, 96, 2][: len(coords)]
            strides, box = [256, 512][: len(coords) - 1], [32, 32, 1][: len(coords)]
            add(coords, 0, dims=dims, strides=strides, box=box)
    return cases


# --- the driver ----------------------------------------------------------------------------------


class Driver:
    """The few calls of libcuda that this needs."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        name, version = ctypes.create_string_buffer(100), ctypes.c_int()
        self.call("cuDeviceGetName", name, 100, device)
        self.call("cuDriverGetVersion", ctypes.byref(version))
        self.gpu, self.version = name.value.decode(), version.value

    def call(self, name: str, *args: Any) -> None:
        code = getattr(self.cuda, name)(*args)
        if code:
            raise RuntimeError(f"{name} returned {code}")

    def alloc(self, nbytes: int) -> int:
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
        return pointer.value

    def write(self, pointer: int, data: bytes) -> None:
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(pointer), data, ctypes.c_size_t(len(data)))

    def read(self, pointer: int, nbytes: int) -> bytes:
        out = ctypes.create_string_buffer(nbytes)
        self.call("cuMemcpyDtoH_v2", out, ctypes.c_uint64(pointer), ctypes.c_size_t(nbytes))
        return out.raw

    def encode(self, c: dict[str, Any], base: int) -> tuple[int, bytes]:
        """(return code, the 128 bytes) of cuTensorMapEncodeTiled."""
        raw = ctypes.create_string_buffer(256)
        at = ctypes.addressof(raw) + -ctypes.addressof(raw) % 64
        ctypes.memset(at, 0, 128)
        rank = len(c["dims"])
        code = self.cuda.cuTensorMapEncodeTiled(
            ctypes.c_void_p(at),
            c["dtype"],
            ctypes.c_uint32(rank),
            ctypes.c_void_p(base + c["address"]),
            (ctypes.c_uint64 * 5)(*c["dims"]),
            (ctypes.c_uint64 * 5)(*c["strides"]),
            (ctypes.c_uint32 * 5)(*c["box"]),
            (ctypes.c_uint32 * 5)(*c["element_strides"]),
            c["interleave"],
            c["swizzle"],
            c["l2"],
            c["oob"],
        )
        return code, ctypes.string_at(at, 128)


PTX_HEAD = (
    ".version 8.3\n.target sm_90\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n"
)


def kernel(rank: int, store: bool) -> str:
    """PTX of one transfer of ``rank`` dimensions by one warp, and a dump of shared memory."""
    coords = ", ".join(f"%c{i}" for i in range(rank))
    load_coords = "\n".join(f"ld.param.b32 %c{i}, [c{i}];" for i in range(rank))
    if store:
        fill = f"shr.u32 %r6, %r3, 2; mul.lo.u32 %r6, %r6, {SMEM_WORD_FACTOR};"
        transfer = f"""
        cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group [%map, {{{coords}}}], [%r7];
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
    else:
        fill = f"mov.u32 %r6, {SMEM_FILL * 0x01010101};"
        transfer = f"""
        mbarrier.arrive.expect_tx.shared.b64 _, [%r5], %bytes;
        cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
            [%r7], [%map, {{{coords}}}], [%r5];
        mov.u32 %r8, 0;
    WAIT:
        mbarrier.try_wait.parity.shared.b64 %p, [%r5], 0;
        @%p bra DONE;
        add.u32 %r8, %r8, 1; setp.lt.u32 %p, %r8, 100000; @%p bra WAIT;
        mov.u32 %ok, 0;"""
    return f"""
    .visible .entry {"store" if store else "load"}{rank}(.param .align 64 .b8 map[128],
        .param .u64 out, .param .u32 c0, .param .u32 c1, .param .u32 c2, .param .u32 c3,
        .param .u32 c4, .param .u32 offset, .param .u32 bytes)
    {{
        .reg .pred %p; .reg .b32 %r<10>, %c<5>, %bytes, %ok; .reg .b64 %map, %out, %at;
        mov.b64 %map, map; cvta.param.u64 %map, %map;
        ld.param.u64 %out, [out]; ld.param.u32 %r4, [offset]; ld.param.u32 %bytes, [bytes];
        {load_coords}
        cvta.to.global.u64 %out, %out;
        mov.u32 %r1, %tid.x; mov.u32 %r2, smem; shl.b32 %r3, %r1, 2; mov.u32 %ok, 1;
        add.u32 %r2, %r2, 1023; and.b32 %r2, %r2, 0xfffffc00;
    FILL:
        setp.ge.u32 %p, %r3, {SMEM_DUMP_BYTES}; @%p bra FILLED;
        {fill}
        add.u32 %r5, %r2, %r3; st.shared.u32 [%r5], %r6; add.u32 %r3, %r3, 128; bra FILL;
    FILLED:
        add.u32 %r5, %r2, {SMEM_DUMP_BYTES}; add.u32 %r7, %r2, %r4;
        setp.ne.u32 %p, %r1, 0; @%p bra INIT;
        mbarrier.init.shared.b64 [%r5], 1;
    INIT:
        fence.proxy.async; bar.sync 0;
        setp.ne.u32 %p, %r1, 0; @%p bra DONE;
        {transfer}
    DONE:
        bar.sync 0; shl.b32 %r3, %r1, 2;
    COPY:
        setp.ge.u32 %p, %r3, {SMEM_DUMP_BYTES}; @%p bra COPIED;
        add.u32 %r5, %r2, %r3; ld.shared.u32 %r6, [%r5];
        cvt.u64.u32 %at, %r3; add.u64 %at, %at, %out; st.global.u32 [%at], %r6;
        add.u32 %r3, %r3, 128; bra COPY;
    COPIED:
        setp.ne.u32 %p, %r1, 0; @%p bra END;
        st.global.u32 [%out+{SMEM_DUMP_BYTES}], %r2;
        st.global.u32 [%out+{SMEM_DUMP_BYTES + 4}], %ok;
    END:
        ret;
    }}"""


def launch(driver: Driver, function: ctypes.c_void_p, c: dict, tmap: bytes, out: int) -> None:
    nbytes = DTYPE_BYTES[c["dtype"]]
    for extent, step in zip(c["box"], c["element_strides"], strict=True):
        nbytes *= -(-extent // step)
    coords = [ctypes.c_int32(x) for x in c["coords"]] + [ctypes.c_int32(0)] * 5
    raw = ctypes.create_string_buffer(256)
    at = ctypes.addressof(raw) + -ctypes.addressof(raw) % 64
    ctypes.memmove(at, tmap, 128)
    params = [
        ctypes.c_uint64(out),
        *coords[:5],
        ctypes.c_uint32(c["smem"]),
        ctypes.c_uint32(nbytes),
    ]
    pointers = (ctypes.c_void_p * 9)(at, *[ctypes.addressof(p) for p in params])
    driver.call(
        "cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, SMEM_DUMP_BYTES + 2048, None, pointers, None
    )
    driver.call("cuCtxSynchronize")


def run_transfers(work: list[tuple[str, int]], results: dict[str, Any], queue: Any) -> None:
    """Run (kind, case number) in turn in this process; a faulting one ends the process."""
    driver = Driver()
    image = PTX_HEAD + "".join(kernel(r, s) for r in range(1, 6) for s in (False, True))
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    driver.call("cuModuleLoadData", ctypes.byref(module), image.encode() + b"\0")
    out, source_bytes = driver.alloc(SMEM_DUMP_BYTES + 8), 1 << 16
    source = driver.alloc(source_bytes)
    data = pattern(source_bytes, 1)
    for kind, number in work:
        c = dict(results[kind][number])
        code, tmap = driver.encode(c, source)
        c["code"] = code
        if not code:
            name = f"{kind}{len(c['dims'])}".encode()
            driver.call("cuModuleGetFunction", ctypes.byref(function), module, name)
            driver.call("cuFuncSetAttribute", function, 8, SMEM_DUMP_BYTES + 2048)
            driver.write(source, data)
            try:
                launch(driver, function, c, tmap, out)
            except RuntimeError as error:
                queue.put((kind, number, {**c, "fault": str(error)}))
                queue.close()
                queue.join_thread()
                return
            dump = driver.read(out, SMEM_DUMP_BYTES + 8)
            c["smem_base"] = int.from_bytes(dump[-8:-4], "little")
            c["completed"] = int.from_bytes(dump[-4:], "little")
            result = dump[:-8] if kind == "load" else driver.read(source, source_bytes)
            c["sha256"] = hashlib.sha256(result).hexdigest()
            if c["dtype"] >= TFLOAT32 and kind == "load":
                c["words"] = dump[: c["box"][0] * 4 * 2].hex()  # two rows: how tf32 rounds
        queue.put((kind, number, c))


def record_encodings(queue: Any) -> None:
    driver = Driver()
    entries = []
    for c in encode_cases():
        code, tmap = driver.encode(c, 0x7F0000000000)
        entries.append({**c, "code": code})
        if not code:
            entries[-1]["hex"] = tmap[:64].hex()
    queue.put({"gpu": driver.gpu, "driver": driver.version, "encode": entries})


def record(path: str) -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=record_encodings, args=(queue,))
    process.start()
    results = queue.get(timeout=60)
    process.join()
    results |= {kind: transfer_cases(kind) for kind in ("load", "store")}
    work = [(kind, i) for kind in ("load", "store") for i in range(len(results[kind]))]
    while work:
        process = context.Process(target=run_transfers, args=(work, results, queue))
        process.start()
        while work:
            kind, number, c = queue.get(timeout=60)
            assert (kind, number) == work.pop(0)
            results[kind][number] = c
            if "fault" in c:
                break
        process.join()
    lines = [f'"gpu": {json.dumps(results["gpu"])}, "driver": {results["driver"]}']
    for kind in ("encode", "load", "store"):
        rows = ",\n".join(json.dumps(c) for c in results[kind])
        lines.append(f'"{kind}": [\n{rows}\n]')
    with open(path, "w") as file:
        file.write("{" + ",\n".join(lines) + "}\n")
    faults = [c for kind in ("load", "store") for c in results[kind] if "fault" in c]
    print(f"{results['gpu']}: {len(faults)} transfers faulted")


if __name__ == "__main__":
    record(sys.argv[1])
