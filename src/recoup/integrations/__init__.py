"""Other libraries' training loops: each module imports its neighbour when it is used."""
