"""Values of the Helm chart that helm-check.py renders, and values that the chart must reject."""

import pathlib
import re

import yaml

CHART = pathlib.Path(__file__).parent / "helm"

GPU_POOL = {
    "name": "h100", "model": "/models/70b", "device": "cuda", "gpus": 2, "weights": "bf16", "replicas": 3, "maxUnavailable": 1,
    "extraArgs": ["--gpu-memory-utilization=0.85"], "nodeSelector": {"gpu": "h100"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}], "resources": {"requests": {"cpu": "8", "memory": "32Gi"}},
}


def cpu_pool(name, cpu=None, **fields):
    return {"name": name, "model": "/models/8b", "device": "cpu", "replicas": 1, "resources": {"requests": {"cpu": cpu}} if cpu else {}, **fields}


NGRAM_POOL = {"name": "ngram", "model": "ngram", "device": "cpu", "replicas": 2, "resources": {"requests": {"cpu": "1"}}}
# The values of the page's examples, and settings of a router's file that must come out as they are.
EXAMPLES = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", (CHART / "README.md").read_text(), re.DOTALL)]
CONFIG = {
    "max_sequences": 512, "suffix_drafts": True, "shadow_share": 0.1, "allowed_origins": ["https://a.example", "https://b.example"],
    "pair_check": ["outrider", "check-pair", "--json"], "objectives": {"batch": 200},
    "lanes": {"code": {"max_k": 6, "min_acceptance": 0.3}, "a.b": {"weight": 2.5, "acceptance": "coupled"}},
    "models": {'org/"m" <&>': {"serves": "llama-3.3-70b", "temperature": 0.3}},
}
ENV = [{"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector:4317"}]
EXTRAS = {
    "env": ENV, "envFrom": [{"secretRef": {"name": "more"}}], "extraVolumes": [{"name": "extra", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "extra", "mountPath": "/extra"}],
}
PLACE = {
    "podLabels": {"team": "llm", "app.kubernetes.io/part-of": "chat"}, "podAnnotations": {"prometheus.io/scrape": "false", "note": "1"},
    "nodeSelector": {"disk": "ssd"}, "tolerations": [{"key": "llm", "operator": "Exists"}], "priorityClassName": "high",
    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]}}},
}
SPREAD = {"topologySpreadConstraints": [
    {"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"},
    {"maxSkew": 1, "topologyKey": "row", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {"matchLabels": {"team": "llm"}}},
]}
VALID_VALUES = {
    "defaults": {},
    "places, labels and an account of the pods": {
        "etcd": PLACE, "router": {**PLACE, **SPREAD, "config": CONFIG}, "targetPools": [{**GPU_POOL, **PLACE, **SPREAD}],
        "draftPools": [{**NGRAM_POOL, "topologySpreadConstraints": []}], "images": {"pullSecrets": [{"name": "registry"}]},
        "serviceAccount": {"create": True, "annotations": {"role": "llm"}},
    },
    "an existing account": {"serviceAccount": {"name": "llm"}},
    "the Prometheus Operator": {
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}}, "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    },
    "an Ingress": {"ingress": {
        "enabled": True, "className": "nginx", "annotations": {"a/b": "off"}, "hosts": ["a.example", "b.example"],
        "tls": [{"hosts": ["a.example"], "secretName": "public"}],
    }},
    "an HTTPRoute": {"httpRoute": {
        "enabled": True, "parentRefs": [{"name": "public", "namespace": "gateways"}], "hostnames": ["a.example"], "timeouts": {"request": "0s"},
    }},
    **{f"example {i} of the page": values for i, values in enumerate(EXAMPLES, 1)},
    "a router's file, variables and volumes": {
        "router": {**EXTRAS, "config": CONFIG}, "targetPools": [{**GPU_POOL, **EXTRAS}], "draftPools": [{**NGRAM_POOL, **EXTRAS}],
    },
    "threads": {
        "targetPools": [cpu_pool("set", threads=3), cpu_pool("whole", cpu="4"), cpu_pool("number", cpu=6), cpu_pool("milli", cpu="2500m")],
        "draftPools": [cpu_pool("half", cpu="500m"), cpu_pool("none"), cpu_pool("argument", cpu="4", extraArgs=["--threads=7"])],
    },
    "TLS, an existing etcd": {
        "etcd": {"enabled": False, "endpoints": "etcd://10.0.0.5:2379,10.0.0.6:2379"},
        "tls": {"clientsSecret": "clients", "workersSecret": "workers"},
    },
    "routers and workers with certificates of their own": {
        "tls": {"clientsSecret": "clients", "routersSecret": "routers", "workersSecret": "workers", "routersName": "routers,public.example"},
        "draftPools": [NGRAM_POOL],
    },
    "one certificate of the routers for clients and workers": {"tls": {"clientsSecret": "public", "routersSecret": "public", "workersSecret": "workers"}},
    "GPU and CPU pools, n-grams, KEDA": {"targetPools": [GPU_POOL], "draftPools": [GPU_POOL, NGRAM_POOL], "keda": {"enabled": True}},
    "HPAs, a pool with its own bounds": {
        "targetPools": [{**GPU_POOL, "scaling": {"min": 1, "max": 3, "models": "70b", "share": 0.5}}],
        "hpa": {"enabled": True}, "scaling": {"tpotMs": 40},
    },
    "KEDA with a regular expression": {"targetPools": [{**GPU_POOL, "scaling": {"models": "(8b|70b)/.*"}}], "keda": {"enabled": True}},
    "targets on several hosts": {
        "targetPools": [{**GPU_POOL, "nodes": 2}, cpu_pool("small", cpu="4", nodes=4), {**GPU_POOL, "name": "one", "nodes": 1}],
        "nodesSecret": "mine", "keda": {"enabled": True},
    },
    "targets on several hosts only": {
        "targetPools": [{**GPU_POOL, "nodes": 2}], "draftPools": [], "hpa": {"enabled": True}, "networkPolicies": {"enabled": False},
    },
    "no drafts, no policies": {"draftPools": [], "networkPolicies": {"enabled": False}},
    "no operators": {"networkPolicies": {"operators": []}},
    "pods with IPv6 addresses": {"ipFamily": "IPv6", "targetPools": [{**GPU_POOL, "nodes": 2}, cpu_pool("small", cpu="4")], "draftPools": [NGRAM_POOL]},
    "a long time to load and to drain": {"workers": {"startupSeconds": 3600, "graceSeconds": 600}},
}
INVALID_VALUES = {
    "no etcd": {"etcd": {"enabled": False}},
    "no targets": {"targetPools": []},
    "an unknown family of addresses": {"ipFamily": "IPv5"},
    "an unknown device": {"targetPools": [{**GPU_POOL, "device": "tpu"}]},
    "a target on three hosts": {"targetPools": [{**GPU_POOL, "nodes": 3}]},
    "a draft model on several hosts": {"draftPools": [{**GPU_POOL, "nodes": 2}]},
    "two autoscalers at once": {"keda": {"enabled": True}, "hpa": {"enabled": True}},
    "a share over 1": {"draftPools": [{**NGRAM_POOL, "scaling": {"share": 2}}]},
    "a misspelt field": {"targetPools": [{**GPU_POOL, "replica": 1}]},
    "a misspelt field of the router": {"router": {"extraArg": []}},
    "a misspelt field at the top": {"targetPool": [GPU_POOL]},
    "a certificate for routers only": {"tls": {"routersSecret": "routers"}},
    "routers without a name": {"tls": {"routersSecret": "routers", "workersSecret": "workers", "routersName": ""}},
    "a misspelt certificate": {"tls": {"routerSecret": "routers", "workersSecret": "workers"}},
    "no threads": {"targetPools": [cpu_pool("none", threads=0)]},
    "an Ingress without hosts": {"ingress": {"enabled": True}},
    "an HTTPRoute without gateways": {"httpRoute": {"enabled": True}},
    "a label that the chart sets": {"router": {"podLabels": {"outrider/pool": "mine"}}},
    "an annotation that is a number": {"targetPools": [{**GPU_POOL, "podAnnotations": {"port": 80}}]},
    "a misspelt affinity": {"etcd": {"affinity": {"podsAffinity": {}}}},
    "a constraint without its key": {"draftPools": [{**NGRAM_POOL, "topologySpreadConstraints": [{"maxSkew": 1}]}]},
    "a setting without a value": {"router": {"config": {"lanes": {"code": {"max_k": None}}}}},
    "an HPA with a regular expression": {"targetPools": [{**GPU_POOL, "scaling": {"models": "8b|70b"}}], "hpa": {"enabled": True}},
    "an HPA with a model name that is no label value": {"targetPools": [{**GPU_POOL, "scaling": {"models": "org/70b"}}], "hpa": {"enabled": True}},
}
# The threads that the pools of the case above must have; None: the worker's default.
THREADS = {"set": "3", "whole": "4", "number": "6", "milli": "2", "half": "1", "none": None, "argument": "7"}
