"""A C program that uses the engine's state-dict operations, built beside the tree as api/state-dict-ops.md says."""
import pathlib
import re
import shlex
import subprocess

import libdcp

import dcpd as lib

PROGRAM = r"""
#include <stdio.h>
#include <string.h>
#include "ops/dcp_ops.h"
#include "plan/flatten.h"
#include "plan/traverse.h"

int main(void)
{
	struct comm_spec spec = { .size = 1, .inside = COMM_SHM, .group_id = 1 };
	struct comm *c;
	int got = 0, in = 7;

	void *const all[] = { (void *)dcp_create, (void *)dcp_copy, (void *)dcp_offload, (void *)dcp_gather, (void *)dcp_broadcast,
			      (void *)dcp_distribute, (void *)dcp_redistribute, (void *)dcp_compare };
	if (comm_arena_new(1, &spec.arena_fd) || comm_open(&spec, &c) || comm_all_reduce(c, &in, &got, 1, DT_INT32, REDUCE_SUM))
		return 1;
	comm_close(c);
	printf("%d of %zu\n", got, sizeof all / sizeof *all);
	return 0;
}
"""


def test_operations_without_the_daemon(tmp_path):
    text = (pathlib.Path(lib.ROOT) / "api/state-dict-ops.md").read_text()
    command = re.search(r"```\n(cc .*?)```", text, re.S)[1].replace("\\\n", " ")
    command = command.replace("$DCPD/build/lib", str(libdcp.BIN.parent / "lib"))
    (tmp_path / "trainer.c").write_text(PROGRAM)
    command = [*shlex.split(command.replace("$DCPD", str(lib.ROOT))), "-o", "trainer"]
    r = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert r.returncode == 0, r.stderr
    assert subprocess.run([tmp_path / "trainer"], capture_output=True, text=True, check=True).stdout == "7 of 8\n"
