"""What deploy/ promises: the unit is valid and tight, the configuration is accepted, the container works (docker.sh)."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_snapshots_outlive_the_service():
    unit = (DEPLOY / "dcpd.service").read_text()
    settings = dict(re.findall(r"^([A-Za-z]+)=(.*)$", unit, re.M))
    assert settings["RemoveIPC"] == "no"
    assert settings["OOMPolicy"] == "continue"
    assert settings["Type"] == "notify"
    assert "DynamicUser" not in settings and "PrivateIPC" not in settings
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


def heavy(script, *arguments):
    """A script that says 77 where this machine cannot run it, with the reason in its last line."""
    out = run(TOP / "tests/e2e" / script, *arguments, timeout=1200)
    if out.returncode == 77:
        pytest.skip(out.stdout.strip().splitlines()[-1])
    assert out.returncode == 0, out.stdout


@pytest.mark.slow
@pytest.mark.seconds(1300)
def test_the_container():
    heavy("docker.sh")
