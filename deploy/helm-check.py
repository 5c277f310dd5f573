#!/usr/bin/env python3
"""Lint and render the Helm chart, and check every object against Kubernetes' schema.

    deploy/helm-check.py [--show CASE]

Renders with Helm's own Go library (PyPI: helm-python-sdk) and validates strictly with kubernetes-validate,
for the default values and for values that enable everything that is off by default. KEDA objects have no
schema here, so only their shape is checked. Nothing is applied to a cluster.
"""

import argparse
import pathlib
import sys

import helm_python
import kubernetes_validate
import yaml

CHART = pathlib.Path(__file__).parent / "helm"
KUBERNETES = "1.30"
OWN_SCHEMAS = {"keda.sh/v1alpha1"}

GPU_POOL = {
    "name": "h100", "model": "/models/70b", "device": "cuda", "gpus": 2, "weights": "bf16", "replicas": 3, "maxUnavailable": 1,
    "extraArgs": ["--gpu-memory-utilization=0.85"], "nodeSelector": {"gpu": "h100"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}], "resources": {"requests": {"cpu": "8", "memory": "32Gi"}},
}
NGRAM_POOL = {"name": "ngram", "model": "ngram", "device": "cpu", "replicas": 2, "resources": {"requests": {"cpu": "1"}}}
CASES = {
    "defaults": {},
    "tls, an etcd of one's own": {
        "etcd": {"enabled": False, "endpoints": "etcd://10.0.0.5:2379,10.0.0.6:2379"},
        "tls": {"clientsSecret": "clients", "workersSecret": "workers"},
    },
    "GPU and CPU pools, n-grams, KEDA": {"targetPools": [GPU_POOL], "draftPools": [GPU_POOL, NGRAM_POOL], "keda": {"enabled": True}},
    "HPAs, a pool with bounds of its own": {
        "targetPools": [{**GPU_POOL, "scaling": {"min": 1, "max": 3, "models": "70b", "share": 0.5}}],
        "hpa": {"enabled": True}, "scaling": {"tpotMs": 40},
    },
    "no drafts, no policies": {"draftPools": [], "networkPolicies": {"enabled": False}},
}
REFUSED = {
    "no etcd": {"etcd": {"enabled": False}},
    "no targets": {"targetPools": []},
    "an unknown device": {"targetPools": [{**GPU_POOL, "device": "tpu"}]},
    "two autoscalers at once": {"keda": {"enabled": True}, "hpa": {"enabled": True}},
    "a share over 1": {"draftPools": [{**NGRAM_POOL, "scaling": {"share": 2}}]},
    "a misspelt field": {"targetPools": [{**GPU_POOL, "replica": 1}]},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", choices=CASES, help="print what a case renders to")
    settings = parser.parse_args()
    print(f"helm {helm_python.helm_sdk_version()}, kubernetes {KUBERNETES}")
    report = helm_python.lint(CHART, strict=True)
    problems = [f"lint: {found}" for found in report["messages"] if found["severity"] > 1] + list(report["errors"])
    chart = helm_python.Chart.load(CHART)
    for name, values in CASES.items():
        objects = render(chart, values)
        found = [fault for one in objects for fault in faults_of(one)]
        found += selectors_without_pods(objects)
        print(f"{name}: {len(objects)} objects, {len(found)} faults")
        problems += [f"{name}: {fault}" for fault in found]
        if settings.show == name:
            print(yaml.safe_dump_all(objects))
    for name, values in REFUSED.items():
        try:
            chart.validate_schema(chart.merge_values(values))
            render(chart, values)
            problems.append(f"{name} was not refused")
        except helm_python.HelmError as error:
            print(f"{name} is refused: {str(error).strip().splitlines()[-1][:120]}")
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(bool(problems))


def render(chart, values):
    rendered = chart.render(values, name="demo", namespace="llm")
    documents = (one for text in rendered.values() for one in yaml.safe_load_all(text))
    return [one for one in documents if one]


def faults_of(one):
    name = f"{one.get('kind')} {one.get('metadata', {}).get('name')}"
    if one["apiVersion"] in OWN_SCHEMAS:
        triggers = one["spec"]["triggers"]
        fewest, most = one["spec"]["minReplicaCount"], one["spec"]["maxReplicaCount"]
        if not 0 <= fewest <= most:
            return [f"{name}: {fewest} to {most} replicas"]
        complete = all({"serverAddress", "query", "threshold"} <= trigger["metadata"].keys() for trigger in triggers)
        return [] if triggers and complete else [f"{name}: a trigger is not complete"]
    try:
        kubernetes_validate.validate(one, KUBERNETES, strict=True)
        return []
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        return [f"{name}: {getattr(error, 'message', error)}"]


def selectors_without_pods(objects):
    """Finds services, disruption budgets and policies that select no pod and so silently have no effect."""
    pods = [one["spec"]["template"]["metadata"]["labels"] for one in objects if "template" in one.get("spec", {})]
    faults = []
    for one in objects:
        spec = one.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector")
        if selector is None:
            continue
        wanted = selector.get("matchLabels", selector)
        if not any(wanted.items() <= labels.items() for labels in pods):
            faults.append(f"{one['kind']} {one['metadata']['name']} selects no pod: {wanted}")
    return faults


if __name__ == "__main__":
    main()
