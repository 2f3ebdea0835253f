"""The tests that a processor's instructions matter to, under caps on those that are used."""
