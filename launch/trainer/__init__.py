"""The parts of the trainer that `launch/train.py` puts together; each module can be read on its own."""
