"""What limits an attention kernel: GPU facts, budgets of tiles, whole problems, and which to pick.

    from roofline import budget, choose
    print(budget("b200", 256, 128, head_dim=128))
    print(choose("b200", 128).reasons["tile"])

Loads neither torch nor the CuTe DSL. `python -m roofline --help` is the command line.
"""

from roofline.budgets import Budget, budget
from roofline.choice import Choice, choose
from roofline.errors import RooflineError
from roofline.gpus import Gpu, Quantity, find_gpu, gpus

__all__ = ["Budget", "Choice", "Gpu", "Quantity", "RooflineError", "budget", "choose"]
__all__ += ["find_gpu", "gpus"]
