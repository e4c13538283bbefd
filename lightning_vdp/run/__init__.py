"""Around the forwards of a run: watching ranks, signals, notebooks, profiler regions."""
