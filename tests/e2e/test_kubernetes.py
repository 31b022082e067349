"""deploy/kubernetes: its form by yamllint and Kubernetes' own schemas, what refers to what, preStop, and names in the cluster's DNS."""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import dcpd as lib

DEPLOY = lib.ROOT / "deploy"
CUSTOM = ("ServiceMonitor", "JobSet")  # kinds of operators: Kubernetes has no schema of them
LINT = ("{extends: default, rules: {line-length: {max: 140}, document-start: disable, comments-indentation: disable, "
        "truthy: {check-keys: false}}}")


def run(*argv, **more):
    return subprocess.run([str(a) for a in argv], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          **{"env": lib.clean_environment(), "timeout": 300, **more})


def kubernetes():
    """Each document of the kit by kind."""
    return {d["kind"]: d for f in sorted((DEPLOY / "kubernetes").glob("*.yaml")) for d in yaml.safe_load_all(f.read_text())}


def merge(base, patch):
    """A strategic merge: objects member by member, lists of named objects by name, all else replaced."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return {**base, **{k: merge(base.get(k), v) for k, v in patch.items()}}
    if isinstance(base, list) and isinstance(patch, list) and all(isinstance(x, dict) and "name" in x for x in [*base, *patch]):
        by_name = {x["name"]: x for x in base}
        return list({**by_name, **{x["name"]: merge(by_name.get(x["name"]), x) for x in patch}}.values())
    return patch


def gpu_kit():
    """DaemonSet and Job as the patches of gpu/ make them."""
    files = sorted((DEPLOY / "kubernetes/gpu").glob("*.yaml"))
    patches = [yaml.safe_load(f.read_text()) for f in files]
    return {p["kind"]: merge(kubernetes()[p["kind"]], p) for p in patches}


def jobset_job(kit):
    """The Job that the JobSet controller makes of the example."""
    template, = kit["JobSet"]["spec"]["replicatedJobs"]
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": f"trainer-{template['name']}-0"},
            "spec": template["template"]["spec"]}


def test_the_kit_fits_together(tmp_path):
    kit = kubernetes()
    assert set(kit) == {"Namespace", "ConfigMap", "Secret", "DaemonSet", "Service", "ServiceMonitor", "PodDisruptionBudget", "Job",
                        "JobSet"}
    name = kit["Namespace"]["metadata"]["name"]
    assert all(d["metadata"]["namespace"] == name for k, d in kit.items() if k != "Namespace")
    pod = kit["DaemonSet"]["spec"]["template"]
    labels = pod["metadata"]["labels"]
    for selector in (kit["DaemonSet"]["spec"]["selector"]["matchLabels"], kit["Service"]["spec"]["selector"],
                     kit["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]):
        assert selector.items() <= labels.items()
    assert kit["ServiceMonitor"]["spec"]["selector"]["matchLabels"].items() <= kit["Service"]["metadata"]["labels"].items()
    assert kit["ServiceMonitor"]["spec"]["endpoints"][0]["authorization"]["credentials"]["key"] in kit["Secret"]["stringData"]
    for spec in (pod["spec"], kit["Job"]["spec"]["template"]["spec"], jobset_job(kit)["spec"]["template"]["spec"]):
        volumes = {v["name"]: v for v in spec["volumes"]}
        for c in [*spec.get("initContainers", []), *spec["containers"]]:
            assert all(m["name"] in volumes for m in c["volumeMounts"]), c["name"]
            assert c["securityContext"]["capabilities"]["drop"] == ["ALL"] and c["securityContext"]["readOnlyRootFilesystem"]
        assert volumes["shm"]["hostPath"]["path"] == "/dev/shm" and volumes["run"]["hostPath"]["path"] == "/run/dcpd"
        assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    dcpd = pod["spec"]["containers"][0]
    assert dcpd["livenessProbe"]["httpGet"]["path"] == "/livez" and dcpd["readinessProbe"]["httpGet"]["path"] == "/readyz"
    wait = int(re.search(r"date \+%s\) \+ (\d+)", dcpd["lifecycle"]["preStop"]["exec"]["command"][2]).group(1))
    conf = kit["ConfigMap"]["data"]["dcpd.conf"]
    drain = int(re.search(r"drain-timeout = (\d+)s", conf).group(1))
    assert pod["spec"]["terminationGracePeriodSeconds"] > wait + drain
    for path in ("/checkpoints", "/var/lib/dcpd", "/run/dcpd"):
        (tmp_path / path.strip("/")).mkdir(parents=True)
    (tmp_path / "dcpd.conf").write_text(re.sub(r"(?<![\w.])/(checkpoints|var|run)\b", rf"{tmp_path}/\1", conf)
                                        .replace("allow-group = dcpd", "allow-group = root"))
    out = run(lib.BIN / "dcpd", "--config", tmp_path / "dcpd.conf", "--check-config")
    assert out.returncode == 0, out.stdout


def tool(name):
    out = subprocess.run([lib.ROOT / "tests/venv.sh", lib.ROOT / "tests/lib/requirements-deploy.txt"], text=True, stdout=subprocess.PIPE,
                         check=True)
    return Path(out.stdout.splitlines()[-1], "bin", name)


def test_the_kit_has_the_form_that_kubernetes_wants(tmp_path):
    kit = kubernetes()
    out = run(tool("yamllint"), "--strict", "-d", LINT, *sorted(DEPLOY.rglob("*.y*ml")))
    assert out.returncode == 0, out.stdout
    known = [d for k, d in kit.items() if k not in CUSTOM] + [jobset_job(kit), *gpu_kit().values()]
    (tmp_path / "kit.yaml").write_text(yaml.safe_dump_all(known))
    out = run(tool("kubernetes-validate"), "--strict", tmp_path / "kit.yaml")
    assert out.returncode == 0 and out.stdout.count(" passed ") == len(known), out.stdout
    (tmp_path / "kit.yaml").write_text(yaml.safe_dump({**jobset_job(kit), "specs": {}}))
    assert run(tool("kubernetes-validate"), "--strict", tmp_path / "kit.yaml").returncode != 0, "it finds a field that is not known"


def by_name(items):
    return {x["name"]: x for x in items}


def test_the_patches_of_gpu_nodes_add_gpus_and_change_nothing_else():
    """dcpd sees all GPUs and takes none from the device plugin, which would keep them from trainers."""
    kit, patched = kubernetes(), gpu_kit()
    assert set(patched) == {"DaemonSet", "Job"}
    for kind, document in patched.items():
        spec, base = (d["spec"]["template"]["spec"] for d in (document, kit[kind]))
        assert spec.pop("runtimeClassName") == "nvidia" and "runtimeClassName" not in base
        for group in ("initContainers", "containers"):
            for c, old in zip(spec.get(group, []), base.get(group, []), strict=True):
                env = by_name(c.pop("env", []))
                old_env = by_name(old.pop("env", []))
                assert old_env.items() <= env.items()
                added = {k: v["value"] for k, v in env.items() if k not in old_env}
                if kind == "DaemonSet":
                    assert c["image"] == "dcpd-cuda:latest" and "nvidia.com/gpu" not in str(c)
                    assert added == ({} if group == "initContainers" else
                                     {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
                                      "NVIDIA_DISABLE_REQUIRE": "1"})
                    c["image"] = old["image"]
                else:
                    assert added == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
                    assert c.pop("resources") == {"limits": {"nvidia.com/gpu": 1}}
        assert document == kit[kind]


def sorted_by_name(x):
    """The order of named objects, and fields that kubectl writes out though they are empty, say nothing."""
    if isinstance(x, dict):
        return {k: sorted_by_name(v) for k, v in x.items() if v not in (None, {})}
    if isinstance(x, list):
        return sorted((sorted_by_name(v) for v in x), key=lambda v: v["name"] if isinstance(v, dict) and "name" in v else "")
    return x


@pytest.mark.parametrize("name", ["daemonset", "trainer.example"])
def test_kubectl_makes_the_same_of_the_patches_of_gpu_nodes(name):
    """By the command of the manual and of the patch itself."""
    if not shutil.which("kubectl"):
        pytest.skip("no kubectl")
    command = f"kubectl patch --local -f deploy/kubernetes/{name}.yaml --patch-file deploy/kubernetes/gpu/{name}.yaml -o yaml |"
    assert command in (DEPLOY / "kubernetes/gpu" / f"{name}.yaml").read_text()
    assert name != "daemonset" or command in (DEPLOY / "README.md").read_text()
    out = subprocess.run(["sh", "-c", f"{command} cat"], cwd=lib.ROOT, text=True, stdout=subprocess.PIPE, check=True)
    got = yaml.safe_load(out.stdout)
    want = gpu_kit()[got["kind"]]
    assert sorted_by_name(got["spec"]) == sorted_by_name(want["spec"]) and got["metadata"]["name"] == want["metadata"]["name"]


def test_prestop_waits_for_the_saves_of_all_runs(d):
    """One run has a checkpoint already, the other none yet."""
    runs, seals = [lib.fresh(), lib.fresh()], []
    d.put(runs[0], [lib.image({"a": ("U8", [50], bytes(50))})])
    d.api.run("save", source={"state_dict": runs[0]}, target={"storage": "main", "name": f"{runs[0]}/step-1"})
    for run_name in runs:
        sd = lib.fresh()
        d.create(sd)
        d.api.submit("save", source={"state_dict": sd, "generation": 1, "await_seal": True},
                     target={"storage": "main", "name": f"{run_name}/step-2"})
        seals.append(sd)
    command = kubernetes()["DaemonSet"]["spec"]["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    env = lib.clean_environment(DCPD_URL=f"unix://{d.socket}", PATH=f"{lib.BIN}:{os.environ['PATH']}")
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as hook:
        for sd in seals:
            with pytest.raises(subprocess.TimeoutExpired):
                hook.wait(1)
            data = lib.image({"a": ("U8", [50], bytes(50))})
            lib.write_segment(d.reserve(sd, 0, len(data), 1)["segment"], data)
            d.seal(sd, 0, 1, len(data))
        assert hook.wait(100) == 0, hook.stdout.read()
    for run_name in runs:
        assert d.api.get(d.api.storage_path("main", f"{run_name}/step-2")).ok(200)


# A DNS server for one name with two addresses, and a client in a network of their own, where port 53 is free and /etc/resolv.conf is ours.
WORLD = """
import os, socket, struct, subprocess, sys, threading
NAME, ADDRESSES = b"dcpd.dcpd.svc.cluster.local", ("127.0.0.2", "127.0.0.1")
def serve(s):
    while True:
        query, peer = s.recvfrom(512)
        labels, at = [], 12
        while query[at]:
            labels.append(query[at + 1:at + 1 + query[at]]); at += 1 + query[at]
        question, kind = query[12:at + 5], struct.unpack(">H", query[at + 1:at + 3])[0]
        is_known = b".".join(labels).lower() == NAME
        answers = ADDRESSES if is_known and kind == 1 else ()
        head = query[:2] + struct.pack(">HHHHH", 0x8580 | (0 if is_known else 3), 1, len(answers), 0, 0)
        s.sendto(head + question + b"".join(b"\\xc0\\x0c" + struct.pack(">HHIH", 1, 1, 5, 4) + socket.inet_aton(a) for a in answers), peer)
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("127.0.0.1", 53))
threading.Thread(target=serve, args=(s,), daemon=True).start()
sys.exit(subprocess.run(sys.argv[1:]).returncode)
"""


def test_the_daemons_are_found_by_a_name_in_the_cluster_s_dns(tmp_path):
    """A pod's resolver completes dcpd.dcpd; the first of the name's addresses is a daemon that is gone, and the kit's configuration accepts
    the names."""
    if os.getuid() != 0 or subprocess.run(["unshare", "--net", "--mount", "true"]).returncode:
        pytest.skip("only root has a network and mounts of its own")
    conf = kubernetes()["ConfigMap"]["data"]["dcpd.conf"]
    assert "0.0.0.0:8427" in conf
    for path in ("checkpoints", "var/lib/dcpd", "run/dcpd"):
        (tmp_path / path).mkdir(parents=True)
    conf = re.sub(r"(?<![\w.])/(checkpoints|var|run)\b", rf"{tmp_path}/\1", conf).replace("0.0.0.0:8427", "127.0.0.1:8427")
    (tmp_path / "dcpd.conf").write_text(conf.replace("allow-group = dcpd", "allow-group = root"))
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\nsearch dcpd.svc.cluster.local svc.cluster.local cluster.local\n"
                                          "options ndots:5\n")
    (tmp_path / "world.py").write_text(WORLD)
    (tmp_path / "pod.sh").write_text(f"""set -eu
{lib.BIN}/dcpd --config {tmp_path}/dcpd.conf >{tmp_path}/log 2>&1 &
daemon=$!
trap 'kill $daemon; wait $daemon' EXIT
for _ in $(seq 600); do {lib.BIN}/dcpctl status --timeout 1s && break; sleep 0.1; done >/dev/null 2>&1
export DCPD_TOKEN_FILE={tmp_path}/var/lib/dcpd/token
for name in dcpd.dcpd dcpd.dcpd.svc dcpd.dcpd.svc.cluster.local; do
	DCPD_URL=http://$name:8427 {lib.BIN}/dcpctl status | head -n 1
	DCPD_URL=http://$name:8427 {sys.executable} -c 'import dcpd; print(dcpd.connect().capabilities()["version"])'
done
DCPD_URL=http://other.dcpd:8427 {lib.BIN}/dcpctl status || echo refused $?
""")
    out = run("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec",
              f"{sys.executable} -c 'import fcntl, socket, struct; s = socket.socket(); "
              "fcntl.ioctl(s, 0x8914, struct.pack(\"16sh22x\", b\"lo\", 1))'\n"
              f"mount --bind {tmp_path}/resolv.conf /etc/resolv.conf\n"
              f"exec {sys.executable} {tmp_path}/world.py bash {tmp_path}/pod.sh",
              env=lib.clean_environment(PYTHONPATH=str(lib.ROOT / "api/python"), DCPD_URL=f"unix://{tmp_path}/run/dcpd/dcpd.sock"))
    assert out.returncode == 0, out.stdout + (tmp_path / "log").read_text()[-2000:]
    assert out.stdout.count(": ready") == 3 and out.stdout.count("\n0.") == 3 and "refused 3" in out.stdout, out.stdout
