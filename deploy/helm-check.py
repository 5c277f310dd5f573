#!/usr/bin/env python3
"""Lint and render the Helm chart, and check every object against Kubernetes' schema.

    deploy/helm-check.py [--show CASE]

Renders with Helm's own Go library (PyPI: helm-python-sdk) and validates strictly with kubernetes-validate,
for the default values and for values that enable everything that is off by default. No schema of the objects of
KEDA, the Prometheus Operator and the Gateway API is available here, so only their content is checked. The plain
manifests get the checks that apply to them. Nothing is applied to a cluster.
"""

import argparse
import pathlib
import re
import sys
import tomllib

import helm_python
import kubernetes_validate
import yaml

CHART = pathlib.Path(__file__).parent / "helm"
MANIFESTS = CHART.parent / "kubernetes"
OBSERVABILITY = CHART.parent / "observability"
KUBERNETES = "1.30"
# API versions whose objects have no schema here.
WITHOUT_SCHEMA = {"keda.sh/v1alpha1", "monitoring.coreos.com/v1", "gateway.networking.k8s.io/v1"}
# What every pod and its container must have.
RESTRICTIONS = {
    "runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10001, "seccompProfile": {"type": "RuntimeDefault"},
    "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True,
}

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
}
INVALID_VALUES = {
    "no etcd": {"etcd": {"enabled": False}},
    "no targets": {"targetPools": []},
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
        errors += ports_open_to_all(objects)
        errors += unrestricted_pods(objects)
        errors += unscraped_pods(objects) + changed_alerts(objects) + routes_to_nothing(objects)
        merged = chart.merge_values(values)
        errors += pods_at_another_place(objects, merged)
        errors += workers_in_the_wrong_image(objects, merged["images"])
        errors += pods_without_their_extras(objects, merged)
        errors += wrong_certificates(objects, merged["tls"])
        errors += nodes_that_do_not_meet(objects, merged)
        if name == "threads":
            errors += wrong_threads(objects)
        if name == "defaults":
            errors += pods_without_requests(objects)
        print(f"{name}: {len(objects)} objects, {len(errors)} errors")
        problems += [f"{name}: {error}" for error in errors]
        if settings.show == name:
            print(yaml.safe_dump_all(objects))
    manifests = [manifest for path in sorted(MANIFESTS.rglob("*.yaml")) for manifest in yaml.safe_load_all(path.read_text())]
    errors = [error for manifest in manifests for error in schema_errors(manifest)]
    errors += selectors_without_pods(manifests) + unrestricted_pods(manifests) + pods_without_requests(manifests)
    print(f"plain manifests: {len(manifests)} objects, {len(errors)} errors")
    problems += [f"plain manifests: {error}" for error in errors]
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
    if manifest["apiVersion"] in WITHOUT_SCHEMA - {"keda.sh/v1alpha1"}:
        return []
    if manifest["apiVersion"] in WITHOUT_SCHEMA:
        triggers = manifest["spec"]["triggers"]
        min_replicas, max_replicas = manifest["spec"]["minReplicaCount"], manifest["spec"]["maxReplicaCount"]
        if not 0 <= min_replicas <= max_replicas:
            return [f"{name}: minReplicaCount {min_replicas} and maxReplicaCount {max_replicas} are not a valid range"]
        complete = all({"serverAddress", "query", "threshold"} <= trigger["metadata"].keys() for trigger in triggers)
        if any(trigger["metadata"].get("ignoreNullValues") != "false" for trigger in triggers):
            return [f"{name}: a trigger takes no data for 0 workers"]
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


def ports_open_to_all(objects):
    """Returns an error for each port that a policy opens to everybody, except those of the API."""
    errors = []
    for manifest in objects:
        if manifest["kind"] != "NetworkPolicy":
            continue
        # A rule without `from`, or with an empty one, admits everybody, and one without `ports` to every port.
        rules = [rule for rule in manifest["spec"].get("ingress") or [] if not rule.get("from")]
        ports = {port["port"] for rule in rules for port in rule.get("ports") or [{"port": "any"}]} - {8000, 8001}
        errors += [f"NetworkPolicy {manifest['metadata']['name']} opens port {port} to everybody" for port in sorted(ports, key=str)]
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


def pods_without_their_extras(objects, values):
    """Returns an error for each pod that lacks what its values add: the router's file, variables, volumes."""
    errors = []
    for name, extras, template in pods_by_values(objects, values):
        pod = template["spec"]
        container, = pod["containers"]
        added = (
            (extras.get("env"), container.get("env")), (extras.get("envFrom"), container.get("envFrom")),
            (extras.get("extraVolumeMounts"), container.get("volumeMounts")), (extras.get("extraVolumes"), pod.get("volumes")),
        )
        errors += [f"{name} lacks {item}" for wanted, rendered in added for item in wanted or [] if item not in (rendered or [])]
        volumes = {volume["name"] for volume in pod.get("volumes", [])} | {"data"}
        errors += [f"{name} mounts {mount['name']}, which is no volume" for mount in container["volumeMounts"] if mount["name"] not in volumes]
        paths = [mount["mountPath"] for mount in container["volumeMounts"]]
        errors += [f"{name} mounts two volumes at {path}" for path in set(paths) if paths.count(path) > 1]
        if ("/dev/shm" in paths) != (extras.get("gpus", 0) > 1):
            errors.append(f"{name} with {extras.get('gpus', 0)} GPUs mounts {paths}")
    files = [tomllib.loads(manifest["data"]["router.toml"]) for manifest in objects if manifest["kind"] == "ConfigMap"]
    if files != ([values["router"]["config"]] if values["router"]["config"] else []):
        errors.append(f"the router's file has {files}")
    has_file = any("--config=/etc/outrider/config/router.toml" in arguments(manifest) for manifest in objects)
    return errors + ([] if has_file == bool(files) else ["the router does not read its file"])


def pods_by_values(objects, values):
    """Returns each pod's `outrider/pool`, the part of the values that is about it, and its template."""
    pools = {f"{role}-{pool['name']}": pool for role in ("target", "draft") for pool in values[f"{role}Pools"]}
    values_by_pool = {**pools, "router": values["router"], "etcd": values["etcd"]}
    templates = pod_templates(objects).values()
    names = (template["metadata"]["labels"]["outrider/pool"] for template in templates)
    return [(name, values_by_pool[name], template) for name, template in zip(names, templates)]


def pod_templates(objects):
    """Returns the pod templates by the names of their Deployments and StatefulSets."""
    return {manifest["metadata"]["name"]: manifest["spec"]["template"] for manifest in objects if "template" in manifest.get("spec", {})}


def pods_at_another_place(objects, values):
    """Returns an error for each pod with another place, other labels or another account than its values say."""
    account, errors = values["serviceAccount"], []
    expected_account = account["name"] or ("demo" if account["create"] else None)
    created = [(manifest["metadata"]["name"], manifest["automountServiceAccountToken"]) for manifest in objects if manifest["kind"] == "ServiceAccount"]
    if created != ([(expected_account, False)] if account["create"] else []):
        errors.append(f"the service accounts are {created}")
    for name, place, template in pods_by_values(objects, values):
        metadata, pod = template["metadata"], template["spec"]
        fields = ("nodeSelector", "affinity", "tolerations", "priorityClassName")
        expected = {field: place[field] for field in fields if place.get(field)} | {"serviceAccountName": expected_account}
        expected["imagePullSecrets"] = values["images"]["pullSecrets"] or None
        errors += [f"{name} has {field} {pod.get(field)}, expected {value}" for field, value in expected.items() if pod.get(field) != value]
        errors += [f"{name} has {field}, which is not in its values" for field in fields if field in pod and field not in expected]
        for kind, added in (("labels", "podLabels"), ("annotations", "podAnnotations")):
            wanted = place.get(added) or {}
            errors += [f"{name} lacks {added} {item}" for item in wanted.items() if item not in metadata.get(kind, {}).items()]
        rendered = pod.get("topologySpreadConstraints", [])
        keys = ["kubernetes.io/hostname", "topology.kubernetes.io/zone"] if name != "etcd" else []
        if "topologySpreadConstraints" in place:
            keys = [constraint["topologyKey"] for constraint in place["topologySpreadConstraints"]]
        if [constraint["topologyKey"] for constraint in rendered] != keys:
            errors.append(f"{name} is spread over {rendered}, expected {keys}")
        selectors = [constraint["labelSelector"]["matchLabels"] for constraint in rendered]
        errors += [f"{name} is spread by {selector}, not its own labels" for selector in selectors if not selector.items() <= metadata["labels"].items()]
    return errors


def unrestricted_pods(objects):
    """Returns an error for each pod that may do more than it needs to, or that gets variables of Services."""
    errors = []
    for name, template in pod_templates(objects).items():
        pod = template["spec"]
        container, = pod["containers"]
        security = pod["securityContext"] | container["securityContext"]
        errors += [f"{name} has {field} {security.get(field)}" for field, value in RESTRICTIONS.items() if security.get(field) != value]
        errors += [f"{name} has not {field}: false" for field in ("automountServiceAccountToken", "enableServiceLinks") if pod.get(field) is not False]
        errors += [f"{name} has {field}" for field in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace") if pod.get(field)]
        errors += [f"{name} mounts {volume} of its host" for volume in pod.get("volumes", []) if "hostPath" in volume]
    return errors


def pods_without_requests(objects):
    """Returns an error for each pod without requests of CPU and memory, or without a limit of memory."""
    errors = []
    for name, template in pod_templates(objects).items():
        resources = template["spec"]["containers"][0].get("resources", {})
        if not {"cpu", "memory"} <= resources.get("requests", {}).keys() or "memory" not in resources.get("limits", {}):
            errors.append(f"{name} has the resources {resources}")
    return errors


def unscraped_pods(objects):
    """Returns an error if a PodMonitor leaves a router or worker out, or gives another job name than prometheus-kubernetes.yml."""
    job, = yaml.safe_load((OBSERVABILITY / "prometheus-kubernetes.yml").read_text())["scrape_configs"]
    label = ["__meta_kubernetes_pod_label_outrider_pool"]
    expected = [
        {"sourceLabels": label, "regex": rule["regex"], "replacement": rule["replacement"], "targetLabel": rule["target_label"]}
        for rule in job["relabel_configs"] if rule["source_labels"] == label
    ]
    errors = []
    for monitor in (manifest for manifest in objects if manifest["kind"] == "PodMonitor"):
        endpoint, = monitor["spec"]["podMetricsEndpoints"]
        selector = monitor["spec"]["selector"]
        keys = {expression["key"] for expression in selector["matchExpressions"] if expression["operator"] == "Exists"}
        if not expected or (endpoint["path"], endpoint["relabelings"]) != ("/metrics", expected):
            errors.append(f"the PodMonitor has the endpoint {endpoint}, expected the relabelings {expected}")
        for name, template in pod_templates(objects).items():
            labels = template["metadata"]["labels"]
            is_selected = selector["matchLabels"].items() <= labels.items() and keys <= labels.keys()
            ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
            if is_selected != ("outrider/role" in labels) or is_selected and endpoint["port"] not in ports:
                errors.append(f"the PodMonitor selects {name}: {is_selected}, with the ports {ports}")
    return errors


def changed_alerts(objects):
    """Returns an error if a PrometheusRule has other rules than alerts.yml, or if the chart has a copy of that file."""
    alerts, own = OBSERVABILITY / "alerts.yml", CHART / "files/alerts.yml"
    errors = [] if own.is_symlink() and own.resolve() == alerts.resolve() else [f"{own} is not a link to {alerts}"]
    expected = yaml.safe_load(alerts.read_text())
    rules = (manifest for manifest in objects if manifest["kind"] == "PrometheusRule")
    return errors + [f"{rule['metadata']['name']} has other rules than {alerts}" for rule in rules if rule["spec"] != expected]


def routes_to_nothing(objects):
    """Returns an error for each Ingress and HTTPRoute that leads to anything but the routers' HTTP port."""
    service, = (manifest for manifest in objects if manifest["kind"] == "Service" and manifest["metadata"]["name"] == "demo")
    port, = (port for port in service["spec"]["ports"] if port["targetPort"] == "http")
    errors = []
    for manifest in objects:
        rules = manifest["spec"]["rules"] if manifest["kind"] in ("Ingress", "HTTPRoute") else []
        if manifest["kind"] == "Ingress":
            backends = [path["backend"]["service"] for rule in rules for path in rule["http"]["paths"]]
            expected = {"name": "demo", "port": {"name": port["name"]}}
        else:
            backends = [backend for rule in rules for backend in rule["backendRefs"]]
            expected = {"name": "demo", "port": port["port"]}
        errors += [f"{manifest['kind']} leads to {backend}, expected {expected}" for backend in backends if backend != expected]
    return errors


def wrong_certificates(objects, tls):
    """Returns an error for each router and worker whose TLS flags lead to other files of Secrets, or other names, than `tls` says."""
    clients, workers = tls["clientsSecret"], tls["workersSecret"]
    routers = tls["routersSecret"] or workers
    expected = {"router": {}, "worker": {}}
    if clients:
        expected["router"] |= {"--tls-cert": (clients, "tls.crt"), "--tls-key": (clients, "tls.key")}
    if workers:
        expected["router"] |= {
            "--worker-ca": (workers, "ca.crt"), "--worker-cert": (routers, "tls.crt"), "--worker-key": (routers, "tls.key"),
            "--worker-name": tls["workersName"],
        }
        expected["worker"] |= {"--tls-cert": (workers, "tls.crt"), "--tls-key": (workers, "tls.key"), "--tls-client-ca": (routers, "ca.crt")}
    if tls["routersSecret"]:
        expected["worker"]["--tls-client-name"] = tls["routersName"]
    errors = []
    for manifest in objects:
        template = manifest.get("spec", {}).get("template", {})
        role = template.get("metadata", {}).get("labels", {}).get("outrider/role")
        if role not in expected:
            continue
        flags = (argument.partition("=") for argument in arguments(manifest) if argument.startswith(("--tls-", "--worker-")))
        found = {flag: file_of_secret(template["spec"], value) or value for flag, _, value in flags}
        if found != expected[role]:
            errors.append(f"{manifest['metadata']['name']} has the TLS flags {found}, expected {expected[role]}")
    return errors


def nodes_that_do_not_meet(objects, values):
    """Returns an error for each target on several hosts whose pods do not find or admit each other, and for what scales one."""
    named = {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in objects}
    pools = [pool for pool in values["targetPools"] if pool.get("nodes", 1) > 1]
    expected = {f"demo-target-{pool['name']}-{i}": pool["nodes"] for pool in pools for i in range(pool["replicas"])}
    sets = {name: manifest for (kind, name), manifest in named.items() if kind == "StatefulSet" and name != "demo-etcd"}
    errors = [] if {name: manifest["spec"]["replicas"] for name, manifest in sets.items()} == expected else [f"the nodes are {list(sets)}, expected {expected}"]
    for name, manifest in sets.items():
        spec, pod = manifest["spec"], manifest["spec"]["template"]
        labels, env = pod["metadata"]["labels"], {variable["name"]: variable.get("valueFrom") for variable in pod["spec"]["containers"][0]["env"]}
        flags = {f"--nnodes={spec['replicas']}", f"--dist-init-addr={name}-0.{spec['serviceName']}:7070"}
        rank = {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}}
        secret = {"secretKeyRef": {"name": values["nodesSecret"], "key": "secret"}}
        if not flags <= set(arguments(manifest)) or (env.get("OUTRIDER_NODE_RANK"), env.get("OUTRIDER_DIST_SECRET")) != (rank, secret):
            errors.append(f"{name} has {arguments(manifest)} and {env}, expected {flags}, {rank} and {secret}")
        if (spec["podManagementPolicy"], spec["updateStrategy"]["type"]) != ("Parallel", "OnDelete"):
            errors.append(f"{name} is started or updated in order")
        # The service and the policy are about this target's pods and no other's.
        service = named.get(("Service", spec["serviceName"]), {}).get("spec", {})
        if (service.get("clusterIP"), service.get("publishNotReadyAddresses")) != ("None", True):
            errors.append(f"{name} has the service {service}")
        selectors = [spec["selector"]["matchLabels"], service.get("selector", {})]
        if values["networkPolicies"]["enabled"]:
            policy = named["NetworkPolicy", name]["spec"]
            selectors += [policy["podSelector"]["matchLabels"], policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"]]
        others = [other["spec"]["template"]["metadata"]["labels"] for other in sets.values() if other is not manifest]
        for selector in selectors:
            if not selector.items() <= labels.items() or any(selector.items() <= other.items() for other in others):
                errors.append(f"{name} has the selector {selector} for the labels {labels}")
    targets = [manifest["spec"]["scaleTargetRef"]["name"] for manifest in objects if "scaleTargetRef" in manifest.get("spec", {})]
    return errors + [f"{target} is scaled, which is no Deployment" for target in targets if ("Deployment", target) not in named]


def file_of_secret(pod, path):
    """Returns the Secret and its key that a pod's container finds at a path; None if there is none."""
    container, = pod["containers"]
    for mount in container["volumeMounts"]:
        if not path.startswith(f"{mount['mountPath']}/"):
            continue
        file = path.removeprefix(f"{mount['mountPath']}/")
        volume, = (volume for volume in pod["volumes"] if volume["name"] == mount["name"])
        if "secret" in volume:
            return volume["secret"]["secretName"], file
        for source in volume.get("projected", {}).get("sources", []):
            for item in source["secret"]["items"]:
                if item["path"] == file:
                    return source["secret"]["name"], item["key"]
    return None


def wrong_threads(objects):
    threads_by_pool = {}
    for manifest in objects:
        labels = manifest.get("spec", {}).get("template", {}).get("metadata", {}).get("labels", {})
        if labels.get("outrider/role") == "worker":
            values = [argument.removeprefix("--threads=") for argument in arguments(manifest) if argument.startswith("--threads=")]
            threads_by_pool[labels["outrider/pool"].split("-")[1]] = ",".join(values) or None
    return [] if threads_by_pool == THREADS else [f"threads are {threads_by_pool}, expected {THREADS}"]


def arguments(manifest):
    containers = manifest.get("spec", {}).get("template", {}).get("spec", {}).get("containers", [])
    return [argument for container in containers for argument in container.get("args", [])]


if __name__ == "__main__":
    main()
