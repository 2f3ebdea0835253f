"""What an engine holds at a moment: for tests, and for whoever wants to see that nothing leaks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStats:
    """What the device's actors hold.

    There are `queries` whose documents are still to come, `documents` of which windows are missing,
    `cut_sequences` with state between steps and pictures with `features`, caches of keys and values
    (`prefill_kv`) and `pooling_states`, and `staged_embeddings` that are still to be written to the cache."""

    queries: int = 0
    documents: int = 0
    cut_sequences: int = 0
    prefill_kv: int = 0
    features: int = 0
    pooling_states: int = 0
    staged_embeddings: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What an engine holds. All numbers are 0 when it is idle.

    `requests` are inside, from their call to their result. `waiting_requests` of them wait for room in the
    queue before they are prepared, and `open_requests` are admitted to it;
    `waiting_tokens` counts cached documents at their price, `waiting_cached` their batches; `steps_in_flight`
    are on the device."""

    requests: int = 0
    waiting_requests: int = 0
    open_requests: int = 0
    waiting_tokens: int = 0
    waiting_sequences: int = 0
    waiting_cached: int = 0
    steps_in_flight: int = 0
    device: DeviceStats = DeviceStats()
