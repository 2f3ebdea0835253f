"""Tests that need a GPU; skipped where there is none (`make test-gpu`)."""
