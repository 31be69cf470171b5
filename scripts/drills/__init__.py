"""The drills of scripts/drill, one a module.

A drill has `USUAL`, the runs that it makes by default, and `drill(times, chance, folder)`, which yields a row a
run. The first line of its docstring is what `scripts/drill --help` says of it. A module without `drill` is no drill.
"""
