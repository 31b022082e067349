"""Real work with the package `made`, which a generator has made of the contract: python generated_client_work.py URL TOKEN"""
import sys
import uuid

from made import AuthenticatedClient
from made.api.default import (create_job, delete_checkpoint, get_job, get_run, hold_checkpoint, list_all_checkpoints, list_checkpoints,
                              list_jobs, list_tensors, livez, move_alias, put_policy, read_tensor, unhold_checkpoint)
from made.models import (CheckpointRef, HoldCheckpointBody, Job, MoveAliasBody, Policy, Problem, ReshardSpec, TensorList, VerifySpec)
from made.models.code import Code
from made.models.read_tensor_format import ReadTensorFormat


def main(url, token):
    client = AuthenticatedClient(base_url=url, token=token, raise_on_unexpected_status=True)

    def run(spec):
        job = create_job.sync(client=client, body=spec, idempotency_key=str(uuid.uuid4()), x_request_id="generated")
        assert isinstance(job, Job), job
        for _ in range(10):
            job = get_job.sync(job.id, client=client, wait="30s")
            if job.state.value in ("succeeded", "failed", "cancelled"):
                break
        assert job.state.value == "succeeded" and not job.additional_properties, job
        return job

    assert livez.sync_detailed(client=client).status_code == 200
    source = CheckpointRef(storage="main", name="a")
    job = run(VerifySpec(kind="verify", source=source))
    assert job.kind.value == "verify" and job.result["verified_bytes"] + job.result["unverifiable"] > 0

    target = ReshardSpec.from_dict({"kind": "reshard", "source": source.to_dict(), "target": {
        "storage": "main", "name": "made/step-1", "world_size": 2, "layout": [{"match": "*", "mesh": [2], "placements": ["Shard(0)"]}]}})
    assert run(target).target["name"] == "made/step-1"
    assert {c.name for c in list_checkpoints.sync("main", client=client).checkpoints} == {"a", "made/step-1"}
    assert len(list_all_checkpoints.sync(client=client).checkpoints) == 2
    assert [j.id for j in list_jobs.sync(client=client, page_size=1).jobs] != [job.id]

    tensors = list_tensors.sync("main", "made/step-1", client=client)
    assert isinstance(tensors, TensorList) and tensors.tensors and not tensors.additional_properties, tensors
    first = tensors.tensors[0]
    got = read_tensor.sync_detailed("main", "made/step-1", first.fqn, client=client, format_=ReadTensorFormat.RAW)
    assert got.status_code == 200 and len(got.content) == first.bytes_

    assert move_alias.sync("main", "made", "best", client=client, body=MoveAliasBody(name="made/step-1")).name == "made/step-1"
    assert get_run.sync("main", "made", client=client).aliases["best"] == "made/step-1"
    hold_checkpoint.sync("main", "made/step-1", client=client, body=HoldCheckpointBody(reason="of the paper"))
    held = delete_checkpoint.sync("main", "made/step-1", client=client)
    assert isinstance(held, Problem) and held.code == Code.CHECKPOINT_HELD and held.request_id, held
    assert unhold_checkpoint.sync_detailed("main", "made/step-1", client=client).status_code in (200, 204)
    policy = put_policy.sync("tidy", client=client, body=Policy.from_dict({"storage": "main", "match": "made", "keep": {"last": 3}}))
    assert policy.name == "tidy", policy
    missing = get_job.sync("0" * 26, client=client)
    assert isinstance(missing, Problem) and missing.code == Code.NOT_FOUND and missing.retryable is False
    print("done")


main(*sys.argv[1:])
