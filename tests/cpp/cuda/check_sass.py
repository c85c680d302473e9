"""Reads the machine code of fccl's CUDA kernels for what their speed and their protocol stand on.

    check_sass.py --cuobjdump cuobjdump --arch 90 fccl/_C.….so
    check_sass.py --cuobjdump cuobjdump --arch 90 kernels.cubin

Bucket kernels: on the aligned path a warp reads and writes whole 32-byte sectors: four elements a lane, so 128
bits for float32, 64 for 16-bit floats; four codes a lane, so 32 or 64 bits. Nowhere single bytes. Packing
kernels: 128 bits a lane on both sides.

Kernels that talk to peers: a release is a barrier for the whole system and then the store of the signal; an
acquire is such a load of it and then the first-level cache thrown away; mailboxes are read past that cache.

The code is read from top to bottom, branches are not followed: this finds a word of the seam that became
another instruction, not a protocol that uses words wrongly. Needs no GPU.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

# Instructions that touch memory or order accesses to it, with what follows their name up to the operands.
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
# Code is said to be generic (LD, ST) where the compiler does not know that a pointer is a global one.
LOAD = re.compile(r"LDG?\.")
STORE = re.compile(r"STG?\.")


def width_of(instruction: str) -> int:
    """The bits that a load or store of one lane moves."""
    for part in instruction.split("."):
        if part in ("U8", "S8"):
            return 8
        if part in ("U16", "S16"):
            return 16
        if part in ("64", "128", "256"):
            return int(part)
    return 32


def count(code: list[str], kind: re.Pattern[str], width: int) -> int:
    """How many loads or stores of that width there are."""
    return sum(1 for one in code if kind.match(one) and width_of(one) == width)


# ---- Bucket kernels ----

SOURCE_BITS = {"FloatSource": 128, "HalfSource": 64}  # four elements
CODE_BITS = {
    "Int8Code": 32,
    "Float8E4M3Code": 32,
    "Float8E5M2Code": 32,
    "Float16Code": 64,
    "BFloat16Code": 64,
}


def at_least(code: list[str], kind: re.Pattern[str], width: int, least: int, what: str) -> list[str]:
    found = count(code, kind, width)
    return (
        [] if found >= least else [f"{found} accesses of {width} bits for {what}, expected {least} or more"]
    )


def check_bucket(kernel: str, arguments: list[str], code: list[str]) -> list[str]:
    *source, code_type, block = [argument.split("<")[0].split("::")[-1] for argument in arguments]
    fours = int(block) // 128  # of each lane
    code_bits = CODE_BITS[code_type]
    wrong: list[str] = []
    loads: dict[int, int] = {}
    stores: dict[int, int] = {}

    def expect(table: dict[int, int], width: int) -> None:
        table[width] = table.get(width, 0) + fours

    if kernel == "EncodeBucket":
        for width in (SOURCE_BITS[source[0]], 128):  # gradients and remainders
            expect(loads, width)
        for width in (128, code_bits):
            expect(stores, width)
    elif kernel == "ReduceShard":
        for width in (code_bits, 128):
            expect(loads, width)
            expect(stores, width)
    else:
        expect(loads, code_bits)
        expect(stores, SOURCE_BITS[source[0]])
    for width, least in loads.items():
        wrong += at_least(code, LOAD, width, least, "loads")
    for width, least in stores.items():
        wrong += at_least(code, STORE, width, least, "stores")
    bytes_ = count(code, LOAD, 8) + count(code, STORE, 8)
    return wrong + ([f"{bytes_} accesses of single bytes, expected none"] if bytes_ else [])


PACK_PER_LANE = 16  # elements of a chunk (kPackPerLane)


def check_pack(kernel: str, arguments: list[str], code: list[str]) -> list[str]:
    loads, stores = (
        PACK_PER_LANE * SOURCE_BITS[one.split("<")[0].split("::")[-1]] // 4 // 128 for one in arguments
    )
    return at_least(code, LOAD, 128, loads, "loads") + at_least(code, STORE, 128, stores, "stores")


# ---- Kernels that talk to peers ----

PHASES = {"OneShotAllReduce": 1, "TwoShotAllReduce": 2, "OneShotAllGather": 1, "Broadcast": 1}


def is_strong_word(instruction: str, kind: re.Pattern[str]) -> bool:
    return bool(kind.match(instruction)) and instruction.endswith(".64.STRONG.SYS")


def releases(code: list[str]) -> int:
    """Stores of a generation that a barrier for the whole system precedes, with no store in between."""
    found, barrier = 0, False
    for one in code:
        if re.match(r"MEMBAR\.\w+\.SYS", one):
            barrier = True
        elif STORE.match(one):
            found += barrier and is_strong_word(one, STORE)
            barrier = False
    return found


def acquires(code: list[str]) -> int:
    """Loads of a generation after which, before any other access, the first-level cache is invalidated."""
    found, loaded = 0, False
    for one in code:
        if one.startswith("CCTL.IVALL"):
            found += loaded
            loaded = False
        elif re.match(
            r"(LDG?|STG?|ATOMG?|RED|MEMBAR)\.", one
        ):  # (a barrier invalidates for a reason of its own)
            loaded = is_strong_word(one, LOAD)
    return found


def check_collective(kernel: str, arguments: list[str], code: list[str]) -> list[str]:
    phases = PHASES[kernel]
    wrong = []
    for what, found in (("releases", releases(code)), ("acquires", acquires(code))):
        if found < phases:
            wrong.append(f"{found} {what} of a generation for the whole system, expected {phases} or more")
    if not any(LOAD.match(one) and one.endswith(".128.STRONG.SYS") for one in code):
        wrong.append("no load of 128 bits that goes past the first-level cache: how are mailboxes read?")
    wrong += at_least(code, LOAD, 128, 2, "loads (the input's and the mailbox's)")
    return wrong + at_least(code, STORE, 128, 2, "stores (a mailbox's and the output's)")


CHECKS: dict[str, Callable[[str, list[str], list[str]], list[str]]] = {
    **dict.fromkeys(("EncodeBucket", "ReduceShard", "DecodeBucket"), check_bucket),
    **dict.fromkeys(("PackTensors", "UnpackTensors"), check_pack),
    **dict.fromkeys(PHASES, check_collective),
}


# ---- The file ----


def demangled(names: list[str]) -> list[str]:
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def split_arguments(text: str) -> list[str]:
    """What stands between commas that are in no inner <…>."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "<") - (letter == ">")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def kernels_of(cuobjdump: str, file: Path, arch: str) -> dict[str, list[str]]:
    """The instructions of each kernel, by the kernel's name in C++: `EncodeBucket<…>`."""
    command = [cuobjdump, "-sass", *([] if file.suffix == ".cubin" else ["-arch", f"sm_{arch}"]), str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    _, *parts = re.split(r"Function : (\S+)", done.stdout)
    code = [INSTRUCTION.findall(text) for text in parts[1::2]]
    kernels = {}
    for name, instructions in zip(demangled(parts[::2]), code, strict=True):
        found = re.match(r"void .*?\bentry<(?:\w+::)*(.*?)\s*>\(", name)
        kernels[found[1] if found else name] = instructions
    return kernels


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cuobjdump", default="cuobjdump")
    parser.add_argument("--arch", required=True, help="compute capability, e.g. 90")
    parser.add_argument("file", type=Path, help="a module, or a .cubin for that architecture")
    options = parser.parse_args()
    kernels = kernels_of(options.cuobjdump, options.file, options.arch)
    flawed = 0
    for name, code in sorted(kernels.items()):
        template, _, arguments = name.partition("<")
        if template not in CHECKS:
            wrong = ["no check for it here: add one to CHECKS"]
        else:
            wrong = CHECKS[template](template, split_arguments(arguments.removesuffix(">")), code)
        flawed += bool(wrong)
        for line in wrong:
            print(f"{name}: {line}")
    print(f"{len(kernels)} kernels for sm_{options.arch}, {flawed} of them not as they should be")
    sys.exit(1 if flawed or not kernels else 0)


if __name__ == "__main__":
    main()
