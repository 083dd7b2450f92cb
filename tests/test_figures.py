"""docs/figures/: each script draws its picture, to scale."""

import shutil
import sys

import pytest
from conftest import REPOSITORY, copy_exercise, run, slow

STEP = slow("dp_ddp_intro", "draw_data_parallel", "img/data_parallel.png")
PIPELINE = "beyond_ddp", "draw_pipeline", "img/pipeline.png"


@pytest.mark.parametrize("folder, script, picture", [PIPELINE, STEP])
def test_a_script_draws_its_picture(folder, script, picture, tmp_path):
    picture = copy_exercise(folder, tmp_path) / picture
    picture.unlink()
    figures = shutil.copytree(REPOSITORY / "docs/figures", tmp_path / "docs/figures")
    done = run([sys.executable, figures / f"{script}.py"], "/")
    assert (done.returncode, done.stderr, picture.exists()) == (0, "", True)
