"""docs/figures/: each script draws its picture, in the colours of all of them."""

import shutil
import sys

import pytest
from conftest import REPOSITORY, copy_exercise, run, slow

INTRO = "dp_ddp_intro"
DRAWN = [
    slow(INTRO, "draw_data_parallel", "data_parallel"),
    (INTRO, "draw_all_reduce", "all_reduce"),
    (INTRO, "draw_buckets", "buckets"),
    (INTRO, "draw_sampler", "sampler"),
    ("beyond_ddp", "draw_fsdp", "fsdp"),
    ("beyond_ddp", "draw_pipeline", "pipeline"),
    ("beyond_ddp", "draw_tensor_parallel", "tensor_parallel"),
]


@pytest.mark.parametrize("folder, script, picture", DRAWN)
def test_a_script_draws_its_picture(folder, script, picture, tmp_path):
    picture = copy_exercise(folder, tmp_path) / f"img/{picture}.png"
    shown = picture.read_bytes()
    picture.unlink()
    figures = shutil.copytree(REPOSITORY / "docs/figures", tmp_path / "docs/figures")
    done = run([sys.executable, figures / f"{script}.py"], "/")
    assert (done.returncode, done.stderr, picture.exists()) == (0, "", True)
    assert shown[16:24] == picture.read_bytes()[16:24]  # its width and height


def test_each_script_is_tested():
    scripts = {file.stem for file in (REPOSITORY / "docs/figures").glob("draw_*.py")}
    assert scripts == {getattr(one, "values", one)[1] for one in DRAWN}


@pytest.mark.slow
def test_the_pictures_of_a_pair_are_sharp_light_and_dark(tmp_path):
    pytest.importorskip("playwright.sync_api")
    if not shutil.which("chromium"):
        pytest.skip("no Chromium here: run sudo apt-get install chromium")
    script = REPOSITORY / "docs/figures/screenshot_pair.py"
    done = run([sys.executable, script, "--to", tmp_path], "/")
    assert (done.returncode, done.stderr) == (0, "")
    light, dark = (
        (tmp_path / f"diff{name}.png").read_bytes() for name in ("", "-dark")
    )
    assert light[16:24] == dark[16:24] and light != dark
    assert int.from_bytes(light[16:20], "big") == 2 * 830
