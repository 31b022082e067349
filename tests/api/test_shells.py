"""Completions in the shells themselves: zsh and fish, with the names that a daemon knows."""
import os
import pty
import re
import select
import shutil
import subprocess
import time

import dcpd as lib
import pytest


@pytest.fixture
def names(d):
    """A job's id and a checkpoint's name, long enough to be the only ones."""
    sd, name = lib.fresh(), f"{lib.fresh()}/step-7"
    d.put(sd, [lib.image({"encoder.weight": ("F32", [4], bytes(16))})])
    job = d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": name})["id"]
    yield job, name
    d.drop(sd)


def environment(d, home):
    env = lib.clean_environment(DCPD_URL=f"unix://{d.socket}", HOME=str(home), XDG_CONFIG_HOME=str(home / "config"), TERM="xterm")
    env["PATH"] = f"{lib.BIN}:{env['PATH']}"
    return env


def needs(shell):
    if not shutil.which(shell):
        pytest.skip(f"no {shell}")


CASES = (("dcpctl undel", "undelete"), ("dcpctl verify main:x --level dig", "digest"), ("dcpctl explain storage_f", "storage_full"),
         ("dcpctl resume --any", "--any-optimizer"))


def cases(names):
    job, name = names
    run = name.split("/")[0]
    return (*CASES, (f"dcpctl show main:{name[:-2]}", f"main:{name}"), (f"dcpctl job {job[:-1]}", job),
            (f"dcpctl events {job[:-1]}", job), (f"dcpctl cat main:{name} enc", "encoder.weight"),
            (f"dcpctl plot main:{name} encoder.w", "encoder.weight"), (f"dcpctl runs main:{run[:-1]}", f"main:{run}"),
            (f"dcpctl show main:{run}@latest", f"main:{run}@latest"))


def test_fish(d, names, tmp_path):
    needs("fish")
    script = subprocess.run([lib.BIN / "dcpctl", "completion", "fish"], capture_output=True, text=True, check=True).stdout
    for line, word in cases(names):
        r = subprocess.run(["fish", "--no-config", "-c", f"{script}\ncomplete -C '{line}'"], capture_output=True, text=True,
                           env=environment(d, tmp_path))
        assert word in [x.split("\t")[0] for x in r.stdout.splitlines()], (line, r.stdout, r.stderr)


class Zsh:
    """An interactive zsh on a terminal."""

    def __init__(self, env, cwd):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(cwd)
            os.execvpe("zsh", ["zsh", "-f", "-i"], env)
        self.shown = ""

    def until(self, pattern, seconds=30):
        end = time.monotonic() + seconds * lib.PATIENCE
        while not (m := re.search(pattern, self.shown)):
            assert time.monotonic() < end, self.shown
            if select.select([self.fd], [], [], 1)[0]:
                self.shown += os.read(self.fd, 65536).decode(errors="replace")
        self.shown = self.shown[m.end():]
        return m

    def type(self, text):
        os.write(self.fd, text.encode())

    def end(self):
        os.close(self.fd)
        os.waitpid(self.pid, 0)


def test_zsh(d, names, tmp_path):
    """Tab completes the word, and what is run then has it as one argument; a name that goes on gets no space."""
    needs("zsh")
    (tmp_path / "_dcpctl").write_bytes(subprocess.run([lib.BIN / "dcpctl", "completion", "zsh"], capture_output=True, check=True).stdout)
    z = Zsh(environment(d, tmp_path), tmp_path)
    try:
        z.type("PS1='READY> '; unsetopt beep prompt_cr prompt_sp; autoload -Uz compinit; compinit -D -u; . ./_dcpctl\n")
        z.type("bindkey '^T' complete-word\n")
        z.type("say() { print -r -- \"SAID<$BUFFER>\"; BUFFER=; zle redisplay }; zle -N say; bindkey '^G' say\n")
        z.type("echo be''gun\n")
        z.until("begun")
        z.until("READY> ")
        for line, word in (*cases(names), ("dcpctl show ma", "main:")):
            z.type(line + "\x14")
            time.sleep(0.05)
            z.type("\x07")
            said = z.until("SAID<([^>]*)>")[1]
            assert said == line.rpartition(" ")[0] + " " + word + ("" if word.endswith(":") else " "), (line, said)
    finally:
        z.end()
