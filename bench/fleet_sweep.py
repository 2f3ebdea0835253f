"""What a fleet of 100 engines is like where one thing differs: where documents go, how many fronts there are,
how large cells are, how uneven documents are asked for, an engine that is slow, one that dies; and small
fleets."""

from collections.abc import Iterator
from typing import Any

from maxsimd.bench.fleet_simulation import FleetShape, Routing, simulate

_MEMBERS = 100


def sweep(requests_an_engine: int) -> Iterator[dict[str, Any]]:
    """One row of figures after the other."""
    for name, shape in _shapes():
        yield {"what": name, **simulate(shape, max(2_000, requests_an_engine * shape.members))}


def line_of(name: str, figures: dict[str, Any]) -> str:
    """A row as it is printed."""
    line = (
        f"  {name:<36} p50 {figures['p50_ms']:6.1f} ms, p99 {figures['p99_ms']:7.1f} ms, "
        f"hits {figures['hits']:.3f}, load max / mean {figures['max_over_mean_load']:.2f}, "
        f"{figures['parts_a_request']:5.1f} parts a request, "
        f"{figures['requests_per_s_an_engine']:5.2f} requests/s an engine"
    )
    if not figures["tried_again"] + figures["failed"]:
        return line
    return f"{line}, {figures['tried_again']:.0f} parts tried again, {figures['failed']:.0f} requests failed"


def _shapes() -> Iterator[tuple[str, FleetShape]]:
    yield "100 engines", FleetShape(_MEMBERS)
    for routing in (Routing.ANYWHERE, Routing.LIGHTER_OF_TWO, Routing.RANDOM):
        yield f"documents {routing.value}", FleetShape(_MEMBERS, routing=routing)
    for fronts in (1, 16):
        yield f"fronts: {fronts}", FleetShape(_MEMBERS, fronts=fronts)
    for size in (1, 4, 16):
        yield f"cells of {size}", FleetShape(_MEMBERS, cell_size=size)
    yield "one cell", FleetShape(_MEMBERS, cell_size=_MEMBERS)
    for zipf in (0.8, 1.2):
        yield f"Zipf {zipf}", FleetShape(_MEMBERS, zipf=zipf)
        yield f"Zipf {zipf}, anywhere", FleetShape(_MEMBERS, zipf=zipf, routing=Routing.ANYWHERE)
    yield "one engine 5 times as slow", FleetShape(_MEMBERS, slowness=5.0)
    yield "one engine dies and is replaced", FleetShape(_MEMBERS, dies=True)
    for members in (8, 9, 12, 16):
        yield f"{members} engines", FleetShape(members)
