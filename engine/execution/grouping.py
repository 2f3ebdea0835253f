"""Groups of sequences of similar length, for backends that attend with batched products. Lengths alone
decide."""

from collections.abc import Sequence

# What one more batched product costs, counted in padding rows that would cost as much.
GROUP_COST_ROWS = 16


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Splits sequences into groups of similar length, each a list of indices into `lengths`.

    Ascending by length. A group takes in the next longer sequence as long as the padding rows that this adds
    cost less than a group of its own would."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    groups: list[list[int]] = []
    padding = 0
    for index in order:
        if groups:
            growth = lengths[index] - lengths[groups[-1][-1]]
            padding += growth * len(groups[-1])
            if padding <= GROUP_COST_ROWS:
                groups[-1].append(index)
                continue
        groups.append([index])
        padding = 0
    return groups


def round_length(length: int) -> int:
    """The number of rows for a sequence of `length` tokens: rounded up a little, so that few different
    numbers occur."""
    multiple = 4 if length <= 32 else 8 if length <= 128 else 16
    return length + -length % multiple


def in_powers_of_two(members: list[int]) -> list[list[int]]:
    """A group split into parts of 1, 2, 4, ... members, largest part first."""
    parts = []
    while members:
        size = 1 << (len(members).bit_length() - 1)
        parts.append(members[:size])
        members = members[size:]
    return parts
