"""deploy/slurm under a real Slurm: a node is given to the next job when the saves of the job's runs are durable, and drained else."""
import pwd
import shutil

import pytest
import slurm
import users

import dcpd as lib

NOBODY = pwd.getpwnam("nobody").pw_uid
pytestmark = [pytest.mark.slow, pytest.mark.seconds(300)]


@pytest.fixture(scope="module")
def cluster():
    """Slurm with the nodes n1, whose scripts talk to the daemon `cluster.d`, and n2, which has none and is down."""
    with users.reachable_folder() as home:
        s = slurm.Slurm(home, ("n1", "n2"), [f"PATH={lib.BIN}:/usr/bin:/bin", f"RUNS_FOLDER={home}/runs",
                                             f"DCPD_URL=unix://{home}/$SLURMD_NODENAME"])
        (home / "out").mkdir()
        (home / "out").chmod(0o1777)
        shutil.copy(lib.ROOT / "deploy/trainer.py", home)
        s.d = lib.Daemon(home / "d", args=["--listen", f"unix:{home}/n1", "--allow-group", users.GROUP.gr_name])
        s.ask("scontrol", "update", "nodename=n2", "state=down", "reason=test")
        yield s
        s.stop()
        s.d.stop()
        s.d.discard()


@pytest.fixture
def awaited(cluster):
    """A run of which a save is accepted and waits for its state dict to be sealed; `seal()` seals it."""
    d, run = cluster.d, lib.fresh()
    d.create(run)
    job = d.api.submit("save", source={"state_dict": run, "generation": 1, "await_seal": True},
                       target={"storage": "main", "name": f"{run}/step-1"})

    def seal():
        data = lib.image({"a": ("U8", [50], bytes(50))})
        lib.write_segment(d.reserve(run, 0, len(data), 1)["segment"], data)
        d.seal(run, 0, 1, len(data))
        assert d.api.wait(job)["milestones"]["durable"]
    return run, seal


def start(cluster, run, *command, **variables):
    return cluster.submit(*command, RUN=f"main:{run}", RUNS_FOLDER=cluster.home / "runs", **variables)


def test_a_training_of_another_user_saves_and_its_node_is_let_go(cluster):
    run = lib.fresh()
    job = start(cluster, run, "/usr/bin/python3", cluster.home / "trainer.py", "--run", run, "--name", run, "--steps", "3", "--mib", "1",
                uid=NOBODY, gid=users.GROUP.gr_gid, DCPD_URL=f"unix://{cluster.home}/n1")
    cluster.wait_for_job(job, "COMPLETED")
    cluster.wait_for_node("n1", "IDLE")
    assert cluster.fields("job", job)["UserId"].endswith(f"({NOBODY})")
    assert not (cluster.home / "runs" / job).exists(), "the epilog has done with it"
    assert "is durable" in (cluster.home / "out" / job).read_text()
    for n in (1, 2, 3):
        cluster.d.api.run("verify", source={"storage": "main", "name": f"{run}/step-{n}"}, level="digest")


@pytest.mark.parametrize("end", ["done", "cancelled"])
def test_a_node_is_held_until_the_last_save_is_durable(cluster, awaited, end):
    run, seal = awaited
    job = start(cluster, run, *(["true"] if end == "done" else ["sleep", "1000"]))
    if end == "cancelled":
        lib.wait_for(lambda: (cluster.home / "runs" / job).exists() and (cluster.home / "runs" / job).read_text(), 60, "the job's line")
        cluster.ask("scancel", job)
    cluster.wait_for_node("n1", "COMPLETING", "IDLE+COMPLETING")
    assert not cluster.d.api.post(f"/v1/runs/main/{run}:drain?wait=1s").ok(200)["drained"]
    assert (cluster.home / "runs" / job).exists()
    next_job = start(cluster, run, "true")
    assert cluster.fields("job", next_job)["JobState"] == "PENDING"
    seal()
    cluster.wait_for_job(next_job, "COMPLETED")
    cluster.wait_for_node("n1", "IDLE")
    assert not (cluster.home / "runs" / job).exists()
    assert cluster.d.api.post(f"/v1/runs/main/{run}:drain").ok(200)["drained"]


def test_a_node_whose_saves_are_late_is_drained_and_their_file_stays(cluster, awaited):
    run, seal = awaited
    settings = cluster.settings.read_text()
    cluster.settings.write_text(settings + "WAIT=200ms\n")
    try:
        job = start(cluster, run, "true")
        cluster.wait_for_node("n1", "IDLE+DRAIN")
    finally:
        cluster.settings.write_text(settings)
    assert "Epilog error" in cluster.fields("node", "n1")["all"]
    assert (cluster.home / "runs" / job).read_text() == f"main:{run}\n"
    seal()
    cluster.resume("n1")


def test_a_node_without_dcpd_is_drained_and_the_job_runs_elsewhere(cluster):
    cluster.ask("scontrol", "update", "nodename=n1", "state=drain", "reason=test")  # until n2 has failed
    cluster.resume("n2")
    run = lib.fresh()
    job = start(cluster, run, "true")
    cluster.wait_for_node("n2", "IDLE+DRAIN")
    assert "Prolog error" in cluster.fields("node", "n2")["all"]
    cluster.resume("n1")
    cluster.wait_for_job(job, "PENDING")
    cluster.ask("scontrol", "update", f"jobid={job}", "starttime=now")  # Slurm lets a job rest for two minutes when it queues it again
    cluster.wait_for_job(job, "COMPLETED")
    assert cluster.fields("job", job)["NodeList"] == "n1"
