#!/usr/bin/env python3
"""Lint and render the Helm chart, and check every object against Kubernetes' schema.

    deploy/helm-check.py [--show CASE]

Renders with Helm's own Go library (PyPI: helm-python-sdk) and validates strictly with kubernetes-validate,
for the default values and for values that enable everything that is off by default. No schema of KEDA objects
is available here, so only their shape is checked. Nothing is applied to a cluster.
"""

import argparse
import pathlib
import sys

import helm_python
import kubernetes_validate
import yaml

CHART = pathlib.Path(__file__).parent / "helm"
KUBERNETES = "1.30"
# API versions whose objects are checked for shape only.
WITHOUT_SCHEMA = {"keda.sh/v1alpha1"}

GPU_POOL = {
    "name": "h100", "model": "/models/70b", "device": "cuda", "gpus": 2, "weights": "bf16", "replicas": 3, "maxUnavailable": 1,
    "extraArgs": ["--gpu-memory-utilization=0.85"], "nodeSelector": {"gpu": "h100"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}], "resources": {"requests": {"cpu": "8", "memory": "32Gi"}},
}
NGRAM_POOL = {"name": "ngram", "model": "ngram", "device": "cpu", "replicas": 2, "resources": {"requests": {"cpu": "1"}}}
# The values of the page's example for GPUs.
EXAMPLE = yaml.safe_load((CHART / "README.md").read_text().split("```yaml\n")[1].split("```")[0])
VALID_VALUES = {
    "defaults": {},
    "the example for GPUs": EXAMPLE,
    "TLS, an existing etcd": {
        "etcd": {"enabled": False, "endpoints": "etcd://10.0.0.5:2379,10.0.0.6:2379"},
        "tls": {"clientsSecret": "clients", "workersSecret": "workers"},
    },
    "GPU and CPU pools, n-grams, KEDA": {"targetPools": [GPU_POOL], "draftPools": [GPU_POOL, NGRAM_POOL], "keda": {"enabled": True}},
    "HPAs, a pool with its own bounds": {
        "targetPools": [{**GPU_POOL, "scaling": {"min": 1, "max": 3, "models": "70b", "share": 0.5}}],
        "hpa": {"enabled": True}, "scaling": {"tpotMs": 40},
    },
    "no drafts, no policies": {"draftPools": [], "networkPolicies": {"enabled": False}},
}
INVALID_VALUES = {
    "no etcd": {"etcd": {"enabled": False}},
    "no targets": {"targetPools": []},
    "an unknown device": {"targetPools": [{**GPU_POOL, "device": "tpu"}]},
    "two autoscalers at once": {"keda": {"enabled": True}, "hpa": {"enabled": True}},
    "a share over 1": {"draftPools": [{**NGRAM_POOL, "scaling": {"share": 2}}]},
    "a misspelt field": {"targetPools": [{**GPU_POOL, "replica": 1}]},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", choices=VALID_VALUES, help="print the rendered objects of a case")
    settings = parser.parse_args()
    print(f"helm {helm_python.helm_sdk_version()}, kubernetes {KUBERNETES}")
    report = helm_python.lint(CHART, strict=True)
    problems = [f"lint: {message}" for message in report["messages"] if message["severity"] > 1] + list(report["errors"])
    chart = helm_python.Chart.load(CHART)
    for name, values in VALID_VALUES.items():
        objects = render(chart, values)
        errors = [error for manifest in objects for error in schema_errors(manifest)]
        errors += selectors_without_pods(objects)
        errors += workers_in_the_wrong_image(objects, chart.merge_values(values)["images"])
        print(f"{name}: {len(objects)} objects, {len(errors)} errors")
        problems += [f"{name}: {error}" for error in errors]
        if settings.show == name:
            print(yaml.safe_dump_all(objects))
    for name, values in INVALID_VALUES.items():
        try:
            chart.validate_schema(chart.merge_values(values))
            render(chart, values)
            problems.append(f"{name}: invalid values were accepted")
        except helm_python.HelmError as error:
            print(f"{name}: rejected: {str(error).strip().splitlines()[-1][:120]}")
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(bool(problems))


def render(chart, values):
    rendered = chart.render(values, name="demo", namespace="llm")
    documents = (document for text in rendered.values() for document in yaml.safe_load_all(text))
    return [document for document in documents if document]


def schema_errors(manifest):
    name = f"{manifest.get('kind')} {manifest.get('metadata', {}).get('name')}"
    if manifest["apiVersion"] in WITHOUT_SCHEMA:
        triggers = manifest["spec"]["triggers"]
        min_replicas, max_replicas = manifest["spec"]["minReplicaCount"], manifest["spec"]["maxReplicaCount"]
        if not 0 <= min_replicas <= max_replicas:
            return [f"{name}: minReplicaCount {min_replicas} and maxReplicaCount {max_replicas} are not a valid range"]
        complete = all({"serverAddress", "query", "threshold"} <= trigger["metadata"].keys() for trigger in triggers)
        return [] if triggers and complete else [f"{name}: a trigger lacks serverAddress, query or threshold"]
    try:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        return []
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        return [f"{name}: {getattr(error, 'message', error)}"]


def selectors_without_pods(objects):
    """Returns an error for each service, disruption budget and policy that selects no pod and so has no effect."""
    pods = [manifest["spec"]["template"]["metadata"]["labels"] for manifest in objects if "template" in manifest.get("spec", {})]
    errors = []
    for manifest in objects:
        spec = manifest.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector")
        if selector is None:
            continue
        match_labels = selector.get("matchLabels", selector)
        if not any(match_labels.items() <= labels.items() for labels in pods):
            errors.append(f"{manifest['kind']} {manifest['metadata']['name']} selects no pod: {match_labels}")
    return errors


def workers_in_the_wrong_image(objects, images):
    """Returns an error for each worker that does not run its own program, or that runs in an image for another device."""
    errors = []
    for manifest in objects:
        pod = manifest.get("spec", {}).get("template", {})
        if pod.get("metadata", {}).get("labels", {}).get("outrider/role") != "worker":
            continue
        container, = pod["spec"]["containers"]
        role = pod["metadata"]["labels"]["outrider/pool"].split("-")[0]
        on_gpu = "nvidia.com/gpu" in container["resources"].get("limits", {})
        expected = images["gpu" if on_gpu else role], [f"outrider-{role}-worker"]
        if (container["image"], container["command"]) != expected:
            errors.append(f"{manifest['metadata']['name']} runs {container['command']} in {container['image']}, expected {expected}")
    return errors


if __name__ == "__main__":
    main()
