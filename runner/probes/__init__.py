"""
Looking at the machine. A probe measures and says what it found; what follows from it is
decided elsewhere. Each has a time limit: a broken card makes `nvidia-smi` hang.
"""
