"""Debian's Slurm on loopback: munge, slurmctld, and a slurmd for each node of one partition; all of them end with the test."""
import os
import secrets
import shutil
import socket
import subprocess

import dcpd as lib
import pytest
from ports import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol")


class Slurm:
    """A cluster below `home`, a folder that all users may come to. `settings` are lines for prolog.sh and epilog.sh, which are copied from
    deploy/slurm. A node that fails a prolog or an epilog is drained until resume()."""

    def __init__(self, home, nodes, settings):
        lacks = [p for p in PROGRAMS if not shutil.which(p)]
        if lacks or os.getuid() != 0:
            pytest.skip(f"Slurm is not to be had here: {'lacks ' + ', '.join(lacks) if lacks else 'it needs root'} (make check-slurm)")
        self.home, self.procs = home, []
        self.settings = home / "settings"
        for script in (lib.ROOT / "deploy/slurm").iterdir():
            shutil.copy(script, home)
        self.settings.write_text("".join(f"{line}\n" for line in settings))
        host = socket.gethostname().split(".")[0]
        control, *ports = free_ports(1 + len(nodes))
        self.conf = home / "slurm.conf"
        self.conf.write_text(f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={home}/munge/s
SlurmctldPort={control}
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/%n.pid
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
KillWait=1
SchedulerParameters=nohold_on_prolog_fail
Prolog={home}/prolog.sh
Epilog={home}/epilog.sh
""" + "".join(f"NodeName={n} NodeHostname={host} NodeAddr=127.0.0.1 Port={p} CPUs=1\n" for n, p in zip(nodes, ports)) +
                             f"PartitionName=all Nodes={','.join(nodes)} Default=YES State=UP\n")
        self.env = lib.clean_environment(SLURM_CONF=str(self.conf))
        (home / "state").mkdir()
        (home / "munge").mkdir(mode=0o755)
        key = home / "munge/key"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o400)
        try:
            self.run("munged", "--force", "--foreground", *(f"--{what}-file={home}/munge/{what}" for what in ("key", "pid", "log", "seed")),
                     f"--socket={home}/munge/s")
            lib.wait_for((home / "munge/s").exists, 10, "munge")
            self.run("slurmctld", "-D")
            for n in nodes:
                self.run("slurmd", "-D", "-N", n)
            for n in nodes:
                self.wait_for_node(n, "IDLE")
        except BaseException:
            self.stop()
            raise

    def run(self, *argv):
        with open(self.home / f"{argv[0]}.log", "ab") as log:
            self.procs.append(subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.env, cwd=self.home))

    def stop(self):
        for p in reversed(self.procs):
            p.terminate()
        for p in reversed(self.procs):
            try:
                p.wait(60)
            except subprocess.TimeoutExpired:
                p.kill()
                p.wait()

    def ask(self, *argv, **more):
        out = subprocess.run([str(a) for a in argv], text=True, capture_output=True, timeout=300, env=self.env, cwd=self.home,
                             **more)
        assert out.returncode == 0, f"{argv}: {out.stdout}{out.stderr}"
        return out.stdout

    def submit(self, *argv, uid=0, gid=0, **variables):
        """Submits train.sbatch with a command to run; its number. What it prints is in NUMBER.out."""
        return self.ask("setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "env", *(f"{k}={v}" for k, v in variables.items()),
                        "sbatch", "--parsable", f"--output={self.home}/out/%j", self.home / "train.sbatch", *argv).strip()

    def fields(self, what, name):
        text = self.ask("scontrol", "--oneliner", "show", what, name)
        return dict(word.split("=", 1) for word in text.split() if "=" in word) | {"all": text}

    def wait_for_node(self, name, *states):
        """Until the node's state is one of these, which its words joined by + are: IDLE, MIXED+DRAIN."""
        def is_so():
            assert all(p.poll() is None for p in self.procs), self.logs()
            return self.fields("node", name)["State"].rstrip("*~#") in states

        lib.wait_for(is_so, 60, f"node {name} {states}", every=0.2)

    def wait_for_job(self, job, *states):
        lib.wait_for(lambda: self.fields("job", job)["JobState"] in states, 60, f"job {job} {states}", every=0.2)

    def resume(self, name):
        self.ask("scontrol", "update", f"nodename={name}", "state=resume")
        self.wait_for_node(name, "IDLE")

    def logs(self):
        return "\n".join(f"{f.name}:\n{f.read_text(errors='replace')[-1500:]}" for f in self.home.glob("*.log"))
