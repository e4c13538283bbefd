import torch

pytest_plugins = ["lightning_vdp.testing.plugin"]
# forked ranks inherit this process: threads of its own would be missing in them
torch.set_num_threads(1)
