# SPDX-License-Identifier: Apache-2.0
"""What the Blackwell and Hopper kernels share: the plan and the mathematics of attention."""
