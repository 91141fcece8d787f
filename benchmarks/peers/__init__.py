"""One driver for each system that runs the workloads of `workloads.py`, each in a separate process.

`w.py` starts `python -m peers.NAME` with this folder's parent on PYTHONPATH. As a module of a package, `trl.py` does
not hide the package of the same name.
"""
