"""One thread for a while: a proof's sequences are so short that threads cost more than they bring, and on a
machine with other work to do, far more."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Lets torch and our kernels compute on the calling thread alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
