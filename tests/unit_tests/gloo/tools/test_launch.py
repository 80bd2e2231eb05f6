"""The two lines of the README are all that a script under torchrun needs."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch
from megatron_fsdp import fully_shard

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = fully_shard(model, optimizer, fsdp_unit_modules=[torch.nn.Linear])
model(torch.ones(2, 8, device=model.device)).sum().backward()
optimizer.step()
optimizer.zero_grad()
print(f"ranks: {torch.distributed.get_world_size()}", flush=True)
"""


def test_a_script_under_torchrun_need_not_initialise_torch_distributed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    engine = Path(__file__).resolve().parents[4] / "megatron/core/distributed/fsdp/src"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(engine), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    # Not the exit status: torch's gloo threads now and then abort a process that has finished (seen with torch alone).
    assert done.stdout.count("ranks: 2") == 2, done.stdout + done.stderr
