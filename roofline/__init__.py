"""What limits an attention kernel: GPU facts, cycle budgets of tiles, traffic of whole problems.

    from roofline import budget
    print(budget("b200", 256, 128, head_dim=128))

Loads neither torch nor the CuTe DSL. `python -m roofline --help` is the command line.
"""

from roofline.budgets import Budget, budget
from roofline.errors import RooflineError
from roofline.gpus import Gpu, Quantity, find_gpu, gpus

__all__ = ["Budget", "Gpu", "Quantity", "RooflineError", "budget", "find_gpu", "gpus"]
