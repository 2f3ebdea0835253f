"""How often keys were asked for lately, in little memory: by which a cache chooses what it keeps."""

# Cells for each key: a key counts in one of each row, and the least of its cells is nearest the truth.
_ROWS = 4
_MOST = 255
_MASK_64 = (1 << 64) - 1
# An odd number with its bits well mixed (2^64 divided by the golden ratio).
_STRIDE = 0x9E3779B97F4A7C15
_HALVED = bytes(count // 2 for count in range(256))


class FrequencySketch:
    """Counts how often keys were asked for. A count is never too low, and is too high where other keys share
    all of a key's cells. Not thread-safe.

    Source: count-min sketch with conservative update and halving, as in TinyLFU (Einziger, Friedman and
    Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", ACM Transactions on Storage 13(4), 2017)."""

    def __init__(self, cells: int) -> None:
        """`cells` in a row, a power of two."""
        self._mask = cells - 1
        self._rows = [bytearray(self._mask + 1) for _ in range(_ROWS)]
        self._counted = 0

    def count(self, key: bytes, period: int) -> None:
        """Counts a key once more. After `period` keys all counts are halved, so that new ones weigh more."""
        cells = self._cells(key)
        least = min(row[cell] for row, cell in zip(self._rows, cells, strict=True))
        if least < _MOST:
            for row, cell in zip(self._rows, cells, strict=True):
                if row[cell] == least:
                    row[cell] = least + 1
        self._counted += 1
        if self._counted >= period:
            self._counted //= 2
            self._rows = [row.translate(_HALVED) for row in self._rows]

    def grow(self, cells: int) -> None:
        """Has that many cells in a row, a power of two, if these are more than now. No estimate changes."""
        times = cells // (self._mask + 1)
        if times > 1:
            self._mask = cells - 1
            self._rows = [row * times for row in self._rows]

    def estimate(self, key: bytes) -> int:
        """How often a key was counted, and not less."""
        return min(row[cell] for row, cell in zip(self._rows, self._cells(key), strict=True))

    def _cells(self, key: bytes) -> list[int]:
        """A key's cell in each row."""
        mixed = hash(key) & _MASK_64
        cells = []
        for _ in range(_ROWS):
            mixed = (mixed * _STRIDE + 1) & _MASK_64
            cells.append((mixed >> 32) & self._mask)
        return cells
