"""rehearse.py: the jobs of a README, and the table of their results."""

import re
import sys

import pytest
from conftest import EXERCISES, REPOSITORY, fails, run
from test_readmes import blocks

import rehearse

# A Slurm that ends each job at once, with this state and this exit status.
SBATCH = """#!/bin/bash
[[ $SBATCH_WAIT == 1 && $SBATCH_JOB_NAME == rehearsal-* ]] || exit 9
[[ $* != *--gpus-per-node=9* ]] || { echo "too many GPUs" >&2; exit 1; }
echo "${@: -2:1} $*" >> jobs
echo "Submitted batch job $(wc -l < jobs)"
exit "${@: -1}"
"""
TIMES = "2026-11-21T23:59:00|2026-11-22T00:02:03|2026-11-22T01:02:03"
SQUEUE = f"""#!/bin/bash
job=${{!#}}
read -r state typed < <(sed -n "${{job##*=}}p" jobs)
echo "$state|{TIMES}|2|gres:gpu:mi250:2|Why"
"""
README = """
```bash
MORE="--short --more"
sbatch run.sh $MORE COMPLETED 0  # 15 s
FROM=$(wc -l < jobs)
sbatch --gpus-per-node=9 run.sh
cp one.py my_one.py
```

<!-- takes long -->
```bash
sbatch run.sh --resume $FROM \\
    COMPLETED 0
A=1 sbatch run.sh FAILED 1
sbatch run.sh FAILED 134  # 15 s, status 134, or 1 by NCCL
bash run.sh COMPLETED 0
```
"""


@pytest.mark.parametrize("folder", EXERCISES)
def test_the_jobs_of_a_readme_are_submitted(folder):
    file = f"{folder}/README.md"
    lines, skipped = rehearse.read_lines(REPOSITORY / file)
    jobs = [line for line in lines if "sbatch " in line]
    typed = [c for _, found in blocks(file) for c in found]
    typed = [c for c in typed if re.search(r"sbatch .*\.sh", c)]
    assert len(jobs) + len(skipped) == len(typed) and len(jobs) > 6
    known = {line.partition("=")[0] for line in lines if "sbatch " not in line}
    assert set(re.findall(r"\$(\w+)", " ".join(lines))) <= known


@pytest.fixture
def lesson(tmp_path, monkeypatch):
    """Return the command that rehearses a folder with this README."""
    commands = {"sbatch": SBATCH, "squeue": SQUEUE, "sinfo": "#!/bin/bash"}
    for name, text in commands.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "lesson").mkdir()
    log = "first\nError: oh no\nsrun: error: n1\n\n"
    files = {"README.md": README, "one.py": "theirs", "slurm-3.out": log}
    for name, text in files.items():
        (tmp_path / "lesson" / name).write_text(text)
    return [sys.executable, REPOSITORY / "tools/rehearse.py", tmp_path / "lesson"]


def test_the_table_has_a_row_per_job(lesson):
    done = run([*lesson, "--students", "20"], "/")
    assert done.returncode == 1 and done.stderr == "", done.stderr
    whole = "183 s 3600 s 4 240.00"  # an hour of two nodes
    see = f"see {lesson[-1]}/slurm-3.out: Error: oh no"
    assert [" ".join(line.split()) for line in done.stdout.splitlines()] == [
        "state waited took GPUs GPU min exit job",
        f"completed {whole} 0 run.sh $MORE COMPLETED 0",
        "refused 0 s 0 s 0 0.00 1 --gpus-per-node=9 run.sh",
        "too many GPUs",
        f"completed {whole} 0 run.sh --resume $FROM COMPLETED 0",
        f"failed {whole} 1 A=1 run.sh FAILED 1",
        see,
        f"expected {whole} 134 run.sh FAILED 134",
        "20 students: 19200 GPU min",
        "2 failed",
    ]
    typed = (lesson[-1] / "jobs").read_text().splitlines()
    assert typed[0].split()[1:-2] == ["run.sh", "--short", "--more"]
    assert "--resume 1 " in typed[1]  # as it was when this line came
    assert (lesson[-1] / "my_one.py").read_text() == "theirs"


def test_a_students_script_is_not_copied_over(lesson):
    (lesson[-1] / "my_one.py").write_text("mine")
    assert run(lesson, "/").returncode == 1
    assert (lesson[-1] / "my_one.py").read_text() == "mine"


def test_no_answer_from_slurm_is_a_user_error(lesson, tmp_path):
    fault = "echo 'Unable to contact slurm' >&2; exit 1"
    (tmp_path / "sinfo").write_text(f"#!/bin/bash\n{fault}\n")
    done = run(lesson, "/")
    fails(done, "Slurm does not answer (Unable", "run this where `sinfo` works")
    assert not (lesson[-1] / "jobs").exists()
