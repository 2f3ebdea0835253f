"""What only a GPU can show; skipped where there is none (`make test-gpu`)."""
