"""A cycle model: replays what the emulator recorded on the units of an SM, then fills the grid.

    hardware    rates of the pipes (from `roofline.gpus`) and latencies, each with tag and source
    blocks      basic blocks in the order that a compiler would issue them
    sm          one cluster of CTAs, instruction by instruction, on its SMs
    grid        all CTAs of the launch over all SMs

The model sees records (`kernels.emulator.records`), never PTX, and no kernel's name.
"""
