"""How fast a compiled kernel can be at most on a GPU, by arithmetic: what of its loop cannot overlap."""

import re
from dataclasses import dataclass

from maxsimd.bench.gpu.ahead_of_time import Loop, MachineCode, unpredicated

# Of a multiprocessor, from the CUDA programming guide's tables for compute capabilities 8.0, 9.0 and 10.0.
_REGISTERS, _THREADS, _SCHEDULERS = 65_536, 2048, 4
# Registers are given to a warp in units of this many.
_REGISTER_UNIT = 256
_RESERVED_SHARED = 1024
# Results a cycle of a multiprocessor's units of special functions, and of those that compare, add integers
# and combine bits.
_SPECIAL, _COMPARE = 16, 64
_COMPARING = re.compile(
    r"^(?:FMNMX3?|FSEL|FSETP|ISETP|SEL|IMNMX|VIMNMX3?|VIADDMNMX|VIADD|IADD3|LEA|LOP3|PLOP3|PRMT|SHF|SGXT)\b"
)
# Bytes a cycle that a multiprocessor reads of its shared memory.
_SHARED_BYTES = 128
# m x n x k of tensor instructions: HGMMA is issued by the four warps of a group together.
_SHAPE = re.compile(r"\b(HGMMA|IGMMA|QGMMA)\.(\d+)x(\d+)x(\d+)")
_SMALL_SHAPE = re.compile(r"\b(?:HMMA|IMMA|QMMA)\.(168\d+|8816|8832)")
_SMALL = {
    "1688": (16, 8, 8),
    "16816": (16, 8, 16),
    "16832": (16, 8, 32),
    "8816": (8, 8, 16),
    "8832": (8, 8, 32),
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the arithmetic takes of a GPU: multiprocessors, their clock in GHz, how many operations in 16 bits
    their tensor cores do a cycle, bytes a second of memory and of the second-level cache, and bytes of a
    multiprocessor's shared memory, and of that and its first-level cache together."""

    name: str
    capability: int
    multiprocessors: int
    clock: float
    tensor: int
    bandwidth: float
    cache_bandwidth: float
    shared: int
    first_level: int


# The caches' rate is what others have measured.
H100 = Gpu("H100", 90, 132, 1.75, 4096, 3.35e12, 5.5e12, 228 * 1024, 256 * 1024)
H200 = Gpu("H200", 90, 132, 1.75, 4096, 4.8e12, 5.5e12, 228 * 1024, 256 * 1024)


def resident_programs(code: MachineCode, gpu: Gpu) -> int:
    """How many programs of a kernel a multiprocessor holds at a time."""
    of_a_warp = -(-code.registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    by_registers = _REGISTERS // (of_a_warp * code.warps)
    by_shared = gpu.shared // (code.shared + _RESERVED_SHARED)
    return min(by_registers, by_shared, _THREADS // (32 * code.warps))


@dataclass(frozen=True, slots=True)
class TurnCycles:
    """The cycles that one turn of a program's loop takes of each unit of a multiprocessor, and the operations
    of its tensor cores. `hidden` cycles are of instructions between a product and the wait for it."""

    tensor: float
    issue: float
    special: float
    compare: float
    hidden: float
    operations: float

    @property
    def rest(self) -> float:
        """Of all but the tensor cores: these units work at the same time."""
        return max(self.issue, self.special, self.compare)

    def alone(self) -> float:
        """For one program a multiprocessor, and for several that do not take turns by themselves: they
        multiply at the same time, and only what is hidden overlaps."""
        hidden = min(self.hidden, self.rest)
        return max(self.tensor, hidden) + self.rest - hidden

    def together(self) -> float:
        """For several programs: while one multiplies, another computes."""
        return max(self.tensor, self.rest)


def turn_cycles(code: MachineCode, loop: Loop, gpu: Gpu) -> TurnCycles:
    """The cycles of a turn of `loop`, of all warps of a program."""
    operations, shared_bytes = 0.0, 0.0
    for instruction in loop.tensor:
        m, n, k, warps = _shape_of(instruction)
        operations += 2.0 * m * n * k * code.warps / warps
        if warps == 4:  # operands come from shared memory, but for a first one in registers
            first = 0 if re.search(r"R\d+, R\d+, gdesc", instruction) else m * k
            shared_bytes += (first + n * k) * 2 * code.warps / warps
    return TurnCycles(
        max(operations / gpu.tensor, shared_bytes / _SHARED_BYTES),
        len(loop) * code.warps / _SCHEDULERS,
        loop.powers * code.warps * 32 / _SPECIAL,
        loop.count(lambda instruction: _COMPARING.match(unpredicated(instruction)) is not None)
        * (code.warps * 32 / _COMPARE),
        len(loop.beside_products) * code.warps / _SCHEDULERS,
        operations,
    )


def most_tflops(code: MachineCode, gpu: Gpu) -> float:
    """The TFLOP/s beyond which a kernel cannot get whose time goes into its main loop."""
    cycles = turn_cycles(code, code.main_loop, gpu)
    taken = cycles.alone() if resident_programs(code, gpu) == 1 else cycles.together()
    return cycles.operations / taken * gpu.multiprocessors * gpu.clock / 1e3


def expected_tflops(code: MachineCode, gpu: Gpu) -> float:
    """As `most_tflops`, where the programs of a multiprocessor do not take turns."""
    cycles = turn_cycles(code, code.main_loop, gpu)
    return cycles.operations / cycles.alone() * gpu.multiprocessors * gpu.clock / 1e3


def _shape_of(instruction: str) -> tuple[int, int, int, int]:
    """m, n and k of a tensor instruction, and how many warps issue it together. Raises ValueError for one
    that is not known."""
    if (large := _SHAPE.search(instruction)) is not None:
        return int(large[2]), int(large[3]), int(large[4]), 4
    if (small := _SMALL_SHAPE.search(instruction)) is not None:
        return *_SMALL[small[1]], 1
    raise ValueError(f"a tensor instruction of unknown shape: {instruction}")
