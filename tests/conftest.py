import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: waiting threads must not spin

import hypothesis
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("lamina", deadline=None, derandomize=True)
hypothesis.settings.load_profile("lamina")
