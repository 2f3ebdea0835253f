"""Compiles Triton kernels ahead of time, for a GPU that need not be there, and reads their machine code."""

import functools
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Arguments that differ from launch to launch, of which the compiler knows no divisor, beside those that a
# kernel itself says must not be specialised.
VARYING = frozenset({"count", "prefix_keys", "window", "repeats"})
POINTERS = {"fp32": "*fp32", "fp16": "*fp16", "bf16": "*bf16", "i8": "*i8"}

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", re.MULTILINE)
_BRANCH = re.compile(r"\bBRA(?:\.\S+)?\s+(?:\S+,\s*)?0x([0-9a-f]+)")
_REGISTERS = re.compile(r"REG:(\d+) STACK:(\d+)")
_TENSOR = re.compile(r"\b(?:HGMMA|IGMMA|QGMMA|HMMA|IMMA|QMMA|UTC\w*MMA)\b")
_ASYNCHRONOUS = ("HGMMA", "IGMMA", "QGMMA")
_EXIT = re.compile(r"^EXIT\b")
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")
# A loop of fewer instructions waits for something; it is no loop of work.
_SHORTEST_LOOP = 12


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel as it is launched: the types of its arguments (32-bit integers where none is given), its
    constants, and the compiler's options. As in a launch, addresses, sizes and strides are multiples of 16,
    but for `varying` ones."""

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
        """Instructions behind the first one for Hopper's tensor cores and before the wait for its result,
        during which they work."""
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

    def by_opcode(self) -> dict[str, int]:
        """How often each operation occurs, the most frequent first."""
        counts: dict[str, int] = {}
        for instruction in self.instructions:
            name = _opcode(instruction).split(".")[0]
            counts[name] = counts.get(name, 0) + 1
        return dict(sorted(counts.items(), key=lambda item: -item[1]))


@dataclass(frozen=True, slots=True)
class MachineCode:
    """What a program of a compiled kernel takes, of `warps` warps: `registers` a thread, bytes of `shared`
    memory, instructions that `spill` registers to memory, its innermost `loops`, and `wide_loads` of 16 bytes
    a thread from global memory."""

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
        """Of the loops with most tensor instructions the shortest, in which a kernel with masked loops at its
        edges spends its time; without such instructions the longest. ValueError if there is no loop."""
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
    return _compiled(
        source.kernel,
        capability,
        tuple(signature.items()),
        tuple(sorted(constants.items())),
        tuple(sorted(source.options.items())),
        source.varying,
    )


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
        code = _machine_code(path)
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


def _machine_code(cubin: Path) -> str:
    """What a program takes, and its instructions."""
    from triton.backends import nvidia

    tool = str(Path(nvidia.__file__).parent / "bin" / "cuobjdump")
    command = [tool, "-res-usage", "-sass", str(cubin)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def unpredicated(instruction: str) -> str:
    """An instruction without the condition on which it is run."""
    return _PREDICATE.sub("", instruction)


def _opcode(instruction: str) -> str:
    return unpredicated(instruction).split(" ")[0]


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
    return [
        Loop(inside)
        for start, stop, inside in spans
        if not any(
            (start, stop) != (other, end) and start <= other and end <= stop for other, end, _ in spans
        )
    ]
