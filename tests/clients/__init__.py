"""Other people's clients against real servers: `make test-clients`. They run in environments of their own."""
