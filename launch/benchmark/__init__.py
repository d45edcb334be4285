"""The parts of the benchmark that `launch/bench.py` puts together; each module can be read on its own."""
