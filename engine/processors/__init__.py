"""One module for each kind of request: its processor and plan. They know neither queues nor devices."""
