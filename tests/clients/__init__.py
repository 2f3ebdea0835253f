"""Other people's clients against real servers: `make test-clients`. Each runs in an environment of its own."""
