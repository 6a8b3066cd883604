"""The collectives of a compiled program, read from its HLO text."""

import math
import re
from typing import NamedTuple

# Bytes that each of n devices in a ring sends, as a share of its result's bytes.
RING = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1.0,  # (n - 1) / n of the operand, n times the result
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-broadcast": lambda n: 1.0,
    "collective-permute": lambda n: 1.0,
}

#     %all-reduce.4 = (f32[], f32[16,8]{1,0}) all-reduce(%a, %b), replica_groups=[2,2]<=[4], ...
#     ROOT %x = (f32[4]{0}, f32[16]{0}) all-gather-start(%a), replica_groups={{0,1,2,3}}, ...
_INSTRUCTION = re.compile(
    rf'^\s*(?:ROOT )?%?[\w.-]+ = (?P<shape>[^"%]*?) (?P<kind>{"|".join(RING)})(?P<start>-start)?\('
)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) .*{$")
_CALLED = re.compile(r"\b(body|calls|to_apply|\w+_computations?)=({[^}]*}|[^,\s]+)")
_TRIPS = re.compile(r'"known_trip_count":\s*{"n":\s*"(\d+)"}')
_ARRAY = re.compile(r"([a-z]+(\d*)\w*)\[([\d,<=]*)\]")


class Collective(NamedTuple):
    """One collective of a program.

    kind   as HLO names it
    bytes  of its result, on each device
    group  devices that take part together
    times  that it runs: more than 1 inside a loop
    """

    kind: str
    bytes: int
    group: int
    times: int = 1

    @property
    def ring_bytes(self) -> float:
        """The bytes that each device sends in a ring of the group.

        >>> Collective("all-reduce", 1000, 4).ring_bytes
        1500.0
        """
        return self.times * RING[self.kind](self.group) * self.bytes


def collectives(text: str) -> list[Collective]:
    """The collectives of an HLO module, in text order; an asynchronous one counts at its start.

    A loop's body appears once in the text. If XLA knows the trips, as for a scan, it writes their
    number there; otherwise the loop counts once. Every branch of a conditional counts.
    """
    found = []
    called: dict[str, tuple[str, int]] = {}  # computation -> the one that calls it, how often
    here = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            here = header[1]
        # Its loops, branches and functions are computations of their own, elsewhere in the text.
        trips = _TRIPS.search(line)
        for how, names in _CALLED.findall(line):
            for name in re.findall(r"[\w.-]+", names):
                called[name] = here, int(trips[1]) if trips and how == "body" else 1
        if match := _INSTRUCTION.match(line):
            group = _group(line, text)
            if group > 1:  # alone, a device sends nothing
                arrays = _ARRAY.findall(match["shape"])
                if match["start"] and match["kind"] != "all-reduce":  # (operands, results, ...)
                    operands = line[match.end() :].partition("), ")[0].count("%")
                    arrays = arrays[operands : 2 * operands]
                size = sum(_bytes(*each) for each in arrays)
                found.append((here, Collective(match["kind"], size, group)))
    return [each._replace(times=_times(called, where)) for where, each in found]


def device_count(text: str) -> int:
    """How many devices run an HLO module together."""
    counts = [re.search(rf"\b{name}=(\d+)", text) for name in ("num_partitions", "replica_count")]
    return math.prod(int(count[1]) for count in counts if count)


def _bytes(kind: str, bits: str, sizes: str) -> int:
    """The bytes of an array; the first number in its type's name is its bits. pred takes a byte."""
    items = math.prod(int(size.strip("<=")) for size in sizes.split(",") if size)
    return math.ceil(items * int(bits or 8) / 8)


def _group(line: str, text: str) -> int:
    """How many devices take part together; four ways to write it.

        replica_groups={{0,1},{2,3}}                    the groups
        replica_groups={}                               all devices
        replica_groups=[2,4]<=[4,2]T(1,0)               2 groups of 4
        replica_groups=mesh['a'=2,'b'=4] {'b'}          along axes of a mesh, or
        replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}     along a part of one: before it 1, itself 2

    A permutation has pairs instead of groups, and needs no group.
    """
    if named := re.search(r"replica_groups=@?mesh\w*\[([^]]*)\] ?{([^}]*)}", line):
        sizes = dict(re.findall(r"'?(\w+)'?=(\d+)", named[1]))
        axes = re.findall(r"'?(\w+)'?(?::\(\d+\)(\d+))?(?:,|$)", named[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
        return int(iota[1])
    if listed := re.search(r"replica_groups={{([\d,]*)}", line):
        return len(listed[1].split(","))
    return device_count(text)


def _times(called: dict[str, tuple[str, int]], computation: str) -> int:
    times = 1  # for a loop inside a loop: the product of their trips
    while computation in called:
        computation, trips = called[computation]
        times *= trips
    return times
