"""Compiles Triton kernels ahead of time, without a GPU, reads their machine code, and bounds their speed by
arithmetic: by the parts of their loops that cannot overlap."""

import functools
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Arguments that differ from launch to launch, so that the compiler knows no divisor of them.
VARYING = frozenset({"count", "prefix_keys", "window", "repeats"})
POINTERS = {"fp32": "*fp32", "fp16": "*fp16", "bf16": "*bf16", "i8": "*i8"}

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", re.MULTILINE)
_BRANCH = re.compile(r"\bBRA(?:\.\S+)?\s+(?:\S+,\s*)?0x([0-9a-f]+)")
_REGISTERS = re.compile(r"REG:(\d+) STACK:(\d+)")
_TENSOR = re.compile(r"\b(?:HGMMA|IGMMA|QGMMA|HMMA|IMMA|QMMA|UTC\w*MMA)\b")
_ASYNCHRONOUS = ("HGMMA", "IGMMA", "QGMMA")
_EXIT = re.compile(r"^EXIT\b")
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")
# Shorter loops only wait.
_SHORTEST_LOOP = 12


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel as launched: the types of its arguments (by default 32-bit integers), its constants, and the
    compiler's options. Addresses, sizes and strides are multiples of 16, except `varying` ones."""

    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, int]
    varying: frozenset[str] = VARYING


@dataclass(frozen=True, slots=True)
class Loop:
    """An innermost loop of machine code: the instructions of one turn of one warp."""

    instructions: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.instructions)

    def count(self, wanted: Callable[[str], bool]) -> int:
        return sum(1 for instruction in self.instructions if wanted(instruction))

    @property
    def tensor(self) -> tuple[str, ...]:
        """The instructions for tensor cores."""
        return tuple(each for each in self.instructions if _TENSOR.search(each))

    @property
    def powers(self) -> int:
        """Instructions for the unit of special functions: 16 results a cycle and multiprocessor."""
        return self.count(lambda instruction: _opcode(instruction).startswith("MUFU"))

    @property
    def beside_products(self) -> tuple[str, ...]:
        """Instructions between one for Hopper's tensor cores and the wait for its result."""
        found: list[str] = []
        multiplies = False
        for instruction in self.instructions:
            if "WARPGROUP.DEPBAR" in instruction:
                multiplies = False
            elif _opcode(instruction).startswith(_ASYNCHRONOUS):
                multiplies = True
            elif multiplies:
                found.append(instruction)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class MachineCode:
    """A compiled program of `warps` warps: `registers` a thread, bytes of `shared` memory, instructions that
    spill registers, innermost `loops`, and `wide_loads` of 16 bytes a thread from global memory."""

    capability: int
    warps: int
    registers: int
    shared: int
    spills: int
    instructions: int
    loops: tuple[Loop, ...] = field(repr=False)
    wide_loads: int = 0

    @property
    def main_loop(self) -> Loop:
        """The shortest of the loops with most tensor instructions: a kernel may have masked loops at its
        edges. Without such instructions, the longest. ValueError if there is no loop."""
        if not self.loops:
            raise ValueError("the kernel has no loop")
        most = max(len(loop.tensor) for loop in self.loops)
        if most == 0:
            return max(self.loops, key=len)
        return min((loop for loop in self.loops if len(loop.tensor) == most), key=len)


def compiled(source: Source, capability: int) -> MachineCode:
    """Compiles a kernel for a compute capability such as 90, with the tools that come with Triton."""
    signature = {
        name: "constexpr" if name in source.constants else source.types.get(name, "i32")
        for name in source.kernel.arg_names
    }
    constants = {name: value for name, value in source.constants.items() if name in source.kernel.arg_names}
    items = tuple(signature.items()), tuple(sorted(constants.items())), tuple(sorted(source.options.items()))
    return _compiled(source.kernel, capability, *items, source.varying)


_Items = tuple[tuple[str, Any], ...]


@functools.cache
def _compiled(
    kernel: Any,
    capability: int,
    signature: _Items,
    constants: _Items,
    options: _Items,
    varying: frozenset[str],
) -> MachineCode:
    import triton
    from triton.backends import nvidia
    from triton.backends.compiler import GPUTarget

    types = dict(signature)
    varying |= {
        parameter.name
        for parameter in kernel.params
        if parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
    }
    even = [name for name, kind in types.items() if kind not in ("constexpr", "fp32") and name not in varying]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in even}
    source = triton.compiler.ASTSource(kernel, signature=types, constexprs=dict(constants), attrs=attributes)
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(found.asm["cubin"])
        tool = str(Path(nvidia.__file__).parent / "bin" / "cuobjdump")
        command = [tool, "-res-usage", "-sass", str(path)]
        code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers = _REGISTERS.search(code)
    assert registers is not None, code
    placed = [(int(address, 16), text) for address, text in _INSTRUCTION.findall(code)]
    spills = sum(1 for _, text in placed if _opcode(text).split(".")[0] in ("LDL", "STL"))
    return MachineCode(
        capability,
        int(found.metadata.num_warps),
        int(registers[1]),
        int(found.metadata.shared),
        spills + (1 if int(registers[2]) else 0),
        len(placed),
        tuple(_loops(placed)),
        sum(1 for _, text in placed if _opcode(text).startswith("LDG") and ".128" in _opcode(text)),
    )


def _unpredicated(instruction: str) -> str:
    """An instruction without the condition on which it is run."""
    return _PREDICATE.sub("", instruction)


def _opcode(instruction: str) -> str:
    return _unpredicated(instruction).split(" ")[0]


def _loops(placed: list[tuple[int, str]]) -> list[Loop]:
    """Innermost loops: from the target of a branch backwards to the branch, without others in between. No
    loop holds the end of the program: a branch from beyond it returns from code that is seldom run."""
    spans = []
    for address, text in placed:
        branch = _BRANCH.search(text)
        if branch is None or int(branch[1], 16) >= address:
            continue
        start = int(branch[1], 16)
        inside = tuple(text for at, text in placed if start <= at <= address)
        if len(inside) >= _SHORTEST_LOOP and not any(_EXIT.match(text) for text in inside):
            spans.append((start, address, inside))
    inner = [(start, stop) for start, stop, _ in spans]
    return [
        Loop(inside)
        for start, stop, inside in spans
        if not any((start, stop) != span and start <= span[0] and span[1] <= stop for span in inner)
    ]


# A multiprocessor's, from the CUDA programming guide's tables for compute capabilities 8.0, 9.0 and 10.0.
_REGISTER_FILE, _THREADS, _SCHEDULERS = 65_536, 2048, 4
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
    """A GPU: multiprocessors, their `clock` in GHz, 16-bit operations a cycle of their `tensor` cores, bytes
    a second of memory and of the second-level cache, and bytes of a multiprocessor's shared memory, and of
    that with its first-level cache."""

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
    """The programs of a kernel that a multiprocessor holds at a time."""
    of_a_warp = -(-code.registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    by_registers = _REGISTER_FILE // (of_a_warp * code.warps)
    by_shared = gpu.shared // (code.shared + _RESERVED_SHARED)
    return min(by_registers, by_shared, _THREADS // (32 * code.warps))


@dataclass(frozen=True, slots=True)
class TurnCycles:
    """The cycles of each unit of a multiprocessor in one turn of a program's loop, and the operations of its
    tensor cores. `hidden` cycles are of instructions between a product and the wait for it."""

    tensor: float
    issue: float
    special: float
    compare: float
    hidden: float
    operations: float

    @property
    def rest(self) -> float:
        """The cycles of the other units, which work at the same time."""
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
        loop.count(lambda instruction: _COMPARING.match(_unpredicated(instruction)) is not None)
        * (code.warps * 32 / _COMPARE),
        len(loop.beside_products) * code.warps / _SCHEDULERS,
        operations,
    )


def most_tflops(code: MachineCode, gpu: Gpu, takes_turns: bool = True) -> float:
    """The upper bound in TFLOP/s of a kernel that spends its time in its main loop. It is higher if the
    programs of a multiprocessor take turns."""
    cycles = turn_cycles(code, code.main_loop, gpu)
    takes_turns &= resident_programs(code, gpu) > 1
    taken = cycles.together() if takes_turns else cycles.alone()
    return cycles.operations / taken * gpu.multiprocessors * gpu.clock / 1e3


def _shape_of(instruction: str) -> tuple[int, int, int, int]:
    """m, n and k of a tensor instruction, and the warps that issue it together."""
    if (large := _SHAPE.search(instruction)) is not None:
        return int(large[2]), int(large[3]), int(large[4]), 4
    if (small := _SMALL_SHAPE.search(instruction)) is not None:
        return *_SMALL[small[1]], 1
    raise ValueError(f"a tensor instruction of unknown shape: {instruction}")
