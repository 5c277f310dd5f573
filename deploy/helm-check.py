#!/usr/bin/env python3
"""Lint and render the Helm chart, and check every object against Kubernetes' schema.

    deploy/helm-check.py [--show CASE]

Renders with Helm's own Go library (PyPI: helm-python-sdk) and validates strictly with kubernetes-validate,
for the default values and for values that enable everything that is off by default. No schema of the objects of
KEDA, the Prometheus Operator and the Gateway API is available here, so only their content is checked. The plain
manifests get the checks that apply to them. Nothing is applied to a cluster.
"""

import argparse
import re
import sys
import tomllib

import helm_python
import kubernetes_validate
import yaml

from helm_check_values import CHART, INVALID_VALUES, THREADS, VALID_VALUES

MANIFESTS = CHART.parent / "kubernetes"
OBSERVABILITY = CHART.parent / "observability"
KUBERNETES = "1.30"
# The job names of the alerts.
JOBS = {"outrider-router", "outrider-target-worker", "outrider-draft-worker"}
# API versions whose objects have no schema here.
WITHOUT_SCHEMA = {"keda.sh/v1alpha1", "monitoring.coreos.com/v1", "gateway.networking.k8s.io/v1"}
# What every pod and its container must have.
RESTRICTIONS = {
    "runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10001, "seccompProfile": {"type": "RuntimeDefault"},
    "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True,
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
        errors += ports_open_to_all(objects)
        errors += unrestricted_pods(objects)
        errors += unscraped_pods(objects) + changed_alerts(objects) + routes_to_nothing(objects)
        merged = chart.merge_values(values)
        errors += pods_at_another_place(objects, merged)
        errors += workers_in_the_wrong_image(objects, merged["images"])
        errors += pods_without_their_extras(objects, merged)
        errors += wrong_certificates(objects, merged["tls"])
        errors += nodes_that_do_not_meet(objects, merged)
        errors += rollouts_that_end_early(objects) + pods_that_keep_their_nodes(objects)
        errors += addresses_of_another_family(objects, merged["ipFamily"])
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
    errors += unscraped_manifests(manifests) + rollouts_that_end_early(manifests)
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
        mounts = container.get("volumeMounts", [])
        errors += [f"{name} mounts {mount['name']}, which is no volume" for mount in mounts if mount["name"] not in volumes]
        paths = [mount["mountPath"] for mount in mounts]
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


def scrape_rules():
    """Returns the relabeling rules of prometheus-kubernetes.yml."""
    job, = yaml.safe_load((OBSERVABILITY / "prometheus-kubernetes.yml").read_text())["scrape_configs"]
    return job["relabel_configs"]


def unscraped_pods(objects):
    """Returns an error if a PodMonitor leaves a router or worker out, or gives other labels than prometheus-kubernetes.yml."""
    sources = ("pod_label_outrider_pool", "namespace", "pod_label_app_kubernetes_io_instance")
    rules = [rule for rule in scrape_rules() if rule["source_labels"] in [[f"__meta_kubernetes_{source}"] for source in sources]]
    names = {"source_labels": "sourceLabels", "target_label": "targetLabel"}
    expected = [{names.get(field, field): value for field, value in rule.items()} for rule in rules]
    errors = [] if {rule["target_label"] for rule in rules} == {"job", "namespace", "release"} else [f"the rules are {rules}"]
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


def rollouts_that_end_early(objects):
    """Returns an error for each Deployment that Kubernetes may declare failed while a worker still loads its checkpoint."""
    startup = {}
    for name, template in pod_templates(objects).items():
        probe = template["spec"]["containers"][0].get("startupProbe")
        if probe:
            startup[name] = probe["periodSeconds"] * probe["failureThreshold"]
    errors = []
    for manifest in (manifest for manifest in objects if manifest["kind"] == "Deployment"):
        name, spec = manifest["metadata"]["name"], manifest["spec"]
        # A worker on the only GPU starts when its predecessor has drained. A router waits for a target.
        drain = spec["template"]["spec"]["terminationGracePeriodSeconds"]
        needed = startup[name] + drain if name in startup else max(startup.values())
        deadline = spec.get("progressDeadlineSeconds", 600)
        if deadline <= needed:
            errors.append(f"{name} has {deadline} s for a new pod, which may need {needed} s")
    return errors


def pods_that_keep_their_nodes(objects):
    """Returns an error for each pod whose volumes of the chart the node autoscaler would keep, and for those that need none."""
    annotation, errors = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes", []
    for name, template in pod_templates(objects).items():
        volumes = [volume["name"] for volume in template["spec"].get("volumes", []) if "emptyDir" in volume and volume["name"] != "extra"]
        released = template["metadata"].get("annotations", {}).get(annotation)
        on_gpu = "nvidia.com/gpu" in template["spec"]["containers"][0]["resources"].get("limits", {})
        if released != (",".join(volumes) or None) or bool(volumes) != on_gpu:
            errors.append(f"{name} has the volumes {volumes} of its node, of which it releases {released}")
    return errors


def addresses_of_another_family(objects, family):
    """Returns an error for each flag of a pod that listens at, or advertises, an address of another family."""
    anywhere, pod = {"IPv4": ("0.0.0.0", "$(POD_IP)"), "IPv6": ("[::]", "[$(POD_IP)]")}[family]
    expected = {flag: anywhere for flag in ("--http", "--grpc", "--admin", "--listen", "--listen-client-urls")} | {"--advertise": pod}
    errors = []
    for manifest in objects:
        container = (manifest.get("spec", {}).get("template", {}).get("spec", {}).get("containers") or [{}])[0]
        for argument in container.get("command", []) + container.get("args", []):
            flag, _, address = argument.partition("=")
            if flag in expected and address.split("://")[-1].rpartition(":")[0] != expected[flag]:
                errors.append(f"{manifest['metadata']['name']} has {argument}, expected {expected[flag]}")
    return errors


def unscraped_manifests(manifests):
    """Returns an error for each annotated pod of the plain manifests to which prometheus-kubernetes.yml gives no job that the alerts know."""
    errors = []
    for name, template in pod_templates(manifests).items():
        if template["metadata"].get("annotations", {}).get("prometheus.io/scrape") != "true":
            continue
        job = None
        for rule in scrape_rules():
            match = re.fullmatch(rule.get("regex", "(.*)"), template["metadata"]["labels"]["app"])
            if rule["source_labels"] == ["__meta_kubernetes_pod_label_app"] and rule["target_label"] == "job" and match:
                job = match.expand(rule.get("replacement", "$1").replace("$", "\\"))
        if job not in JOBS:
            errors.append(f"{name} gets the job {job}")
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
    for mount in container.get("volumeMounts", []):
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
