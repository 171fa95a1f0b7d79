"""The search for schedules of chains whose stages differ in cost: `frontier` and `optimal`."""
