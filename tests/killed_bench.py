"""Run the bench, and be killed with SIGKILL before the n-th line of what saves that is run.

python tests/killed_bench.py n --flag=value ...
"""

from __future__ import annotations

import sys

from killed_while_saving import kill_self_at_line

from minidist import tensor_file, train_dir
from minidist.bench.__main__ import main
from minidist.checkpoint import saving, shards, training
from minidist.train_dir import folder

kill_self_at_line(int(sys.argv[1]), saving, shards, training, tensor_file, train_dir, folder)
sys.exit(main(sys.argv[2:]))
