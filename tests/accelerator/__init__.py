"""Models on an accelerator that does not exist. It needs a process of its own."""
