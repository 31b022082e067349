"""What deploy/ promises: the unit is valid and tight, the configuration is accepted, container and service work (docker.sh, systemd.sh)."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import dcpd as lib

TOP = Path(__file__).resolve().parents[2]
DEPLOY = TOP / "deploy"
BIN = Path(os.environ.get("BIN", TOP / "build/bin"))


def run(*argv, **more):
    return subprocess.run([str(a) for a in argv], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          **{"env": lib.clean_environment(), "timeout": 300, **more})


@pytest.fixture
def unit_root(tmp_path):
    """A root folder as `systemd-analyze --root` wants it: the unit, and something executable where it starts it."""
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd-analyze")
    units = tmp_path / "etc/systemd/system"
    units.mkdir(parents=True)
    shutil.copy(DEPLOY / "dcpd.service", units)
    system = Path("/usr/lib/systemd/system")
    for unit in ("multi-user.target", "network.target", "local-fs.target", "remote-fs.target", "sysinit.target", "basic.target"):
        if (system / unit).exists():
            shutil.copy(system / unit, units)
    return tmp_path


def test_the_unit_is_tight(unit_root):
    out = run("systemd-analyze", "security", "--offline=yes", "--threshold=30", f"--root={unit_root}", "dcpd.service")
    assert out.returncode == 0, out.stdout
    assert "ignoring" not in out.stdout


def test_the_drop_in_of_gpu_hosts_lets_it_see_nvidia_s_devices_alone(unit_root):
    """The devices, and what driver and NCCL do that the unit forbids: nothing else of the unit is looser."""
    folder = unit_root / "etc/systemd/system/dcpd.service.d"
    folder.mkdir()
    shutil.copy(DEPLOY / "dcpd-gpu.conf", folder / "gpu.conf")
    out = run("systemd-analyze", "security", "--offline=yes", "--threshold=40", f"--root={unit_root}", "dcpd.service")
    assert out.returncode == 0 and "ignoring" not in out.stdout and "Unknown" not in out.stdout, out.stdout
    settings = re.findall(r"^([A-Za-z]+)=(.*)$", (DEPLOY / "dcpd-gpu.conf").read_text().split("[Service]")[1], re.M)
    assert settings == [("PrivateDevices", "no"), ("DevicePolicy", "closed"), ("DeviceAllow", "char-nvidia* rwm"),
                        ("ExecStartPre", "-+/usr/bin/nvidia-modprobe -u -c=0"), ("MemoryDenyWriteExecute", "no"),
                        ("RestrictAddressFamilies", "AF_NETLINK")]
    for page in (DEPLOY / "README.md", DEPLOY / "dcpd.service", TOP / "Makefile"):
        assert "dcpd-gpu.conf" in page.read_text(), page


def test_the_drop_in_of_gpu_hosts_is_valid_where_nvidia_modprobe_is_missing(unit_root):
    folder = unit_root / "etc/systemd/system/dcpd.service.d"
    folder.mkdir()
    (unit_root / "usr/bin").mkdir(parents=True)
    for program in ("dcpd", "kill"):
        (unit_root / "usr/bin" / program).write_text("#!/bin/sh\n")
        (unit_root / "usr/bin" / program).chmod(0o755)
    (unit_root / "bin").symlink_to("usr/bin")
    text = (DEPLOY / "dcpd-gpu.conf").read_text()
    for setting in ("Wants", "After"):
        assert "modprobe@nvidia_uvm.service" in re.findall(rf"^{setting}=(.*)$", text, re.M), "DeviceAllow= names loaded modules only"
    for drop_in, is_valid in ((text, True), (text.replace("ExecStartPre=-+", "ExecStartPre=+"), False)):
        (folder / "gpu.conf").write_text(drop_in)
        out = run("systemd-analyze", "verify", "--man=no", f"--root={unit_root}", "dcpd.service")
        assert (out.returncode == 0, "nvidia-modprobe is not executable" in out.stdout) == (is_valid, not is_valid), out.stdout


def test_snapshots_outlive_the_service():
    unit = (DEPLOY / "dcpd.service").read_text()
    settings = dict(re.findall(r"^([A-Za-z]+)=(.*)$", unit, re.M))
    assert settings["RemoveIPC"] == "no"
    assert settings["OOMPolicy"] == "continue"
    assert settings["Type"] == "notify"
    assert "DynamicUser" not in settings and "PrivateIPC" not in settings
    assert "RestrictSUIDSGID" not in settings, "systemd refuses openat2 for it: dcpd does not start"
    assert settings["User"] in (DEPLOY / "dcpd.sysusers.conf").read_text()


def test_sysusers_makes_the_user(tmp_path):
    if not shutil.which("systemd-sysusers"):
        pytest.skip("no systemd-sysusers")
    (tmp_path / "etc").mkdir()
    out = run("systemd-sysusers", f"--root={tmp_path}", DEPLOY / "dcpd.sysusers.conf")
    assert out.returncode == 0, out.stdout
    line = next(x for x in (tmp_path / "etc/passwd").read_text().splitlines() if x.startswith("dcpd:"))
    assert int(line.split(":")[2]) < 1000, "logind removes the shared memory of users that are not system users"
    assert any(x.startswith("dcpd:") for x in (tmp_path / "etc/group").read_text().splitlines())


@pytest.mark.parametrize("name", ["dcpd.conf", "container.conf"])
def test_the_configuration_is_accepted(name, tmp_path):
    if not (BIN / "dcpd").exists():
        pytest.skip(f"{BIN}/dcpd is not built")
    text = (DEPLOY / name).read_text()
    for path in ("/srv/checkpoints", "/checkpoints", "/var/lib/dcpd", "/run/dcpd"):
        (tmp_path / path.strip("/")).mkdir(parents=True, exist_ok=True)
    text = re.sub(r"(?<![\w.])/(srv|checkpoints|var|run)\b", rf"{tmp_path}/\1", text)
    text = text.replace("allow-group = dcpd", "allow-group = root")
    conf = tmp_path / name
    conf.write_text(text)
    out = run(BIN / "dcpd", "--config", conf, "--check-config")
    assert out.returncode == 0, out.stdout


def test_the_bill_of_materials_has_every_library():
    if not shutil.which("dpkg-query"):
        pytest.skip("no dpkg")
    bill = json.loads(run(sys.executable, DEPLOY / "sbom.py", "dcpd", BIN / "dcpctl").stdout)
    parts = {c["name"]: c for c in bill["components"]}
    assert bill["bomFormat"] == "CycloneDX" and bill["metadata"]["component"]["version"] == (TOP / "VERSION").read_text().strip()
    assert {"libcurl4", "libjansson4", "libc6"} <= set(parts)
    for c in parts.values():
        assert c["version"] and c["purl"].startswith(f"pkg:deb/debian/{c['name']}@{c['version']}?arch="), c
    assert {"license": {"name": "BSD-3-Clause"}} in parts["libcurl4"]["licenses"]
    of_image = run(sys.executable, DEPLOY / "sbom.py", "image", "-", input="bash\t5.2\tamd64\n").stdout
    assert [c["purl"] for c in json.loads(of_image)["components"]] == ["pkg:deb/debian/bash@5.2?arch=amd64"]


def knobs(text):
    """Variables that a compose file uses, with their defaults."""
    return dict(re.findall(r"\$\{([A-Z_]+):-([^}]*)\}", text))


def test_every_knob_of_compose_is_documented_with_its_default_and_is_used():
    files = [DEPLOY / "compose.yaml", DEPLOY / "compose.gpu.yaml"]
    used = {k: v for f in files for k, v in knobs(f.read_text()).items()}
    text = "".join(f.read_text() for f in files)
    known = sum(len(re.findall(rf"\$\{{{k}:(?:-|\+@\}})", text)) for k in used)  # with a default, or the @ before a digest
    assert len(re.findall(r"\$\{", text)) == known, "a form that is not known"
    documented = dict(line.split("=", 1) for line in (DEPLOY / ".env.example").read_text().splitlines() if line and line[0] != "#")
    assert documented == used


def test_compose_files_name_only_what_there_is():
    base = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    gpu = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())
    assert set(gpu["services"]) <= set(base["services"])
    for name, service in [*base["services"].items(), *gpu["services"].items()]:
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (DEPLOY / source).is_file() if source.startswith(".") else source in base["volumes"], (name, volume)
        if "build" in service:
            assert (TOP / service["build"]["dockerfile"]).is_file(), name
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), (name, port)
    pinned = "${DCPD_BASE:-debian:bookworm-slim}${DCPD_BASE_DIGEST:+@}${DCPD_BASE_DIGEST:-}"
    assert all(s.get("build") or s["image"] == pinned or s["image"].startswith("${DCPD_") and ":-" in s["image"]
               for s in base["services"].values()) and base["services"]["shm"]["image"] == pinned
    for service in base["services"].values():
        assert service["cap_drop"] == ["ALL"] and "no-new-privileges:true" in service["security_opt"]
    scrape = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"][0]
    host, port = scrape["static_configs"][0]["targets"][0].split(":")
    command = base["services"][host]["command"]
    assert command[command.index("--allowed-host") + 1] == host and f"0.0.0.0:{port}" in command
    assert scrape["job_name"] == "dcpd", "the alert rules look for this job"


def test_what_compose_hands_to_dcpd_are_options_of_its_own(tmp_path):
    """Each variable of the service, with the default that Compose gives it, is taken by dcpd, and says the same as no variable."""
    if not (BIN / "dcpd").exists():
        pytest.skip(f"{BIN}/dcpd is not built")
    handed = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["dcpd"]["environment"]
    assert {"DCPD_WORKERS", "DCPD_JOB_MEMORY", "DCPD_SHM_LIMIT", "DCPD_DEVICE_LIMIT", "DCPD_KEEP_SEALED", "DCPD_LEASE", "DCPD_FILE_MODE",
            "DCPD_KEEP_JOBS", "DCPD_LOG_FORMAT", "DCPD_OTLP_ENDPOINT"} <= set(handed)
    defaults = {name: knobs(value)[name] for name, value in handed.items()}

    def config(env):
        out = run(BIN / "dcpd", "--state-dir", tmp_path, "--print-config", env=lib.clean_environment(**env))
        assert out.returncode == 0, out.stdout
        return [line.split("#")[0].rstrip() for line in out.stdout.splitlines()]

    assert config(defaults) == config({})


def test_trainers_of_the_gpu_override_have_memory_that_dcpd_takes_of_another_uid():
    """Descriptors, not handles: tests/api/test_device_memory.py tries both, as another user."""
    trainer = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())["services"]["trainer"]
    assert knobs(trainer["environment"]["PYTORCH_CUDA_ALLOC_CONF"]) == {"DCPD_TRAINER_ALLOC_CONF": "expandable_segments:True"}
    assert "pid" not in trainer, "not needed for descriptors"


def test_a_driver_older_than_the_base_s_cuda_is_not_refused_by_the_toolkit():
    """CUDA bases set NVIDIA_REQUIRE_CUDA to their own release; dcpd needs the driver's release 470 only."""
    for service in yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())["services"].values():
        assert knobs(service["environment"]["NVIDIA_DISABLE_REQUIRE"]) == {"NVIDIA_DISABLE_REQUIRE": "1"}
    last = (DEPLOY / "Dockerfile.cuda").read_text().split("\nFROM ")[-1]
    assert re.search(r"^ENV NVIDIA_DISABLE_REQUIRE=1$", last, re.M)


def test_images_are_built_of_what_the_build_needs_and_share_user_and_health_check():
    wanted = set(re.search(r"^BUILD_DEBS := ((?:.*\\\n)*.*)", (TOP / "Makefile").read_text(), re.M).group(1).replace("\\", "").split())
    texts = {name: (DEPLOY / name).read_text() for name in ("Dockerfile", "Dockerfile.cuda")}
    for name, text in texts.items():
        build = re.search(r"AS build\n(.*?)WORKDIR", text, re.S).group(1)
        assert wanted <= set(build.split()), (name, wanted - set(build.split()))
        for base in re.findall(r"^FROM (\S+)", text, re.M):
            assert re.fullmatch(r"\$\{(\w+)\}\$\{(\w+_DIGEST):\+@\}\$\{\2\}", base), f"{name}: {base} cannot be pinned"
        for source in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M):
            assert all((TOP / x).exists() for x in source.split()), (name, source)
    stages = [re.search(r"AS build\n.*?^RUN make .*?\n", t, re.S | re.M).group() for t in texts.values()]
    assert stages[0] == stages[1], "who builds both images compiles once"
    common = r"HEALTHCHECK.*\n.*\n|^USER .*|^ENTRYPOINT \[\"dcpd.*|.*useradd.*|.*groupadd.*"
    same = [re.findall(common, t, re.M) for t in texts.values()]
    assert same[0] == same[1] and len(same[0]) == 5


def test_the_seccomp_profile_is_docker_s_with_io_uring(tmp_path):
    profile = json.loads((DEPLOY / "seccomp.json").read_text())
    always = {n for r in profile["syscalls"] if r["action"] == "SCMP_ACT_ALLOW" and not (r.get("includes") or r.get("args"))
              for n in r["names"]}
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    assert {"io_uring_setup", "io_uring_enter", "io_uring_register", "landlock_restrict_self", "seccomp", "openat2"} <= always
    assert not {"add_key", "bpf", "kexec_load", "mount", "open_by_handle_at", "userfaultfd", "init_module"} & always
    again = run(sys.executable, DEPLOY / "seccomp.py", DEPLOY / "seccomp.json").stdout
    assert again == (DEPLOY / "seccomp.json").read_text(), "what the script makes of its own result is the same"
    open_profile = tmp_path / "open.json"
    open_profile.write_text(json.dumps({**profile, "defaultAction": "SCMP_ACT_ALLOW"}))
    out = run(sys.executable, DEPLOY / "seccomp.py", open_profile)
    assert out.returncode == 1 and "not Docker's" in out.stdout


def slurm(tmp_path, script, exits, lines=None):
    """Runs a Slurm script with a dcpctl that exits as `exits` says by run; what it was called with, and the exit status."""
    bin_folder, runs = tmp_path / "bin", tmp_path / "runs"
    bin_folder.mkdir(exist_ok=True)
    (bin_folder / "logger").write_text('#!/bin/sh\necho "$@" >>"$LOG"\n')
    (bin_folder / "dcpctl").write_text(f'#!/bin/sh\necho "dcpctl $*" >>"$LOG"\ncase "$2" in {exits} esac\n')
    for f in bin_folder.iterdir():
        f.chmod(0o755)
    if lines is not None:
        runs.mkdir(exist_ok=True)
        (runs / "7").write_text(lines)
    log = tmp_path / "log"
    log.write_text("")
    shutil.copy(DEPLOY / "slurm" / script, tmp_path)
    (tmp_path / "settings").write_text(f"PATH={bin_folder}:/usr/bin:/bin\nLOG={log}\nRUNS_FOLDER={runs}\nWAIT=5s\n")
    out = run(tmp_path / script, env={"SLURM_JOB_ID": "7", "SLURM_JOB_UID": str(os.getuid())})  # Slurm hands over no other environment
    return out.returncode, log.read_text(), (runs / "7").exists()


def test_slurm_s_prolog_wants_a_daemon_and_makes_the_job_s_file(tmp_path):
    assert slurm(tmp_path, "prolog.sh", "*) exit 3;;")[::2] == (1, False)
    assert slurm(tmp_path, "prolog.sh", "*) exit 0;;")[::2] == (0, True)
    assert (tmp_path / "runs/7").stat().st_mode & 0o777 == 0o600


def test_slurm_s_epilog_keeps_the_node_until_all_is_durable_and_trusts_no_line(tmp_path):
    assert slurm(tmp_path, "epilog.sh", "*) exit 0;;") == (0, "", False)
    code, log, left = slurm(tmp_path, "epilog.sh", "*) exit 0;;", "main:run1\n--url http://evil\n$(touch x)\nmain:a b\n")
    assert code == 0 and not left and "dcpctl drain main:run1 --wait 5s\n" in log and "dcpctl drain main:a b --wait 5s\n" in log
    assert log.count("dcpctl") == 2 and log.count("names no run") == 2
    code, log, left = slurm(tmp_path, "epilog.sh", "main:b) exit 4;; *) exit 5;;", "main:a\nmain:b\n")
    assert code == 1 and left and "main:a has failed" in log and "main:b are not durable" in log


def heavy(script, *arguments):
    """A script that says 77 where this machine cannot run it, with the reason in its last line."""
    out = run(TOP / "tests/e2e" / script, *arguments, timeout=1200)
    if out.returncode == 77:
        pytest.skip(out.stdout.strip().splitlines()[-1])
    assert out.returncode == 0, out.stdout
    print(out.stdout)


@pytest.mark.slow
@pytest.mark.seconds(1300)
@pytest.mark.parametrize("script", ["docker.sh", "systemd.sh"])
def test_it_runs(script):
    if script == "systemd.sh" and not list(TOP.glob("build/deb/dcpd_*.deb")):
        pytest.skip("there are no packages (make deb)")
    heavy(script)
