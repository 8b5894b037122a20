"""What the stand-in server keeps, and how it answers as W&B's GraphQL schema has it."""

import base64
import json
from dataclasses import dataclass, field
from itertools import count
from urllib.parse import quote

ENTITY = "team"
CREATED = "2026-01-01T00:00:00Z"
FEATURES = ("ARTIFACT_COLLECTION_MEMBERSHIP_FILES",)


def connection(nodes):
    edges = [{"node": node, "cursor": str(i)} for i, node in enumerate(nodes)]
    end = {"__typename": "PageInfo", "hasNextPage": False, "endCursor": str(len(edges))}
    return {"edges": edges, "pageInfo": end, "totalCount": len(edges)}


@dataclass
class Run:
    entity: str
    project: str
    name: str
    number: int
    display_name: str = ""
    group: str = ""
    job_type: str = ""
    tags: list = field(default_factory=list)
    config: dict = field(default_factory=dict)
    summary: dict = field(default_factory=dict)
    streams: dict = field(default_factory=dict)  # history lines by client: those of a shared run count for themselves
    events: list = field(default_factory=list)
    files: dict = field(default_factory=dict)
    alerts: list = field(default_factory=list)
    artifacts: list = field(default_factory=list)
    exit_code: int | None = None
    preempting: bool = False
    starts: int = 0

    @property
    def state(self):
        if self.exit_code is None:
            return "running"
        return "finished" if self.exit_code == 0 else "preempted" if self.preempting else "failed"

    @property
    def history(self):
        return [line for lines in self.streams.values() for line in lines]

    def rows(self):
        return [json.loads(line) for line in self.history]


@dataclass
class Artifact:
    number: int
    run: Run
    name: str
    type: str
    digest: str
    state: str = "PENDING"
    manifest: bytes = b""
    files: dict = field(default_factory=dict)
    version: int = 0


class Store:
    """Everything that was sent."""

    def __init__(self, url):
        self.url = url
        self.runs: dict[tuple[str, str, str], Run] = {}
        self.artifacts: dict[str, Artifact] = {}
        self.views: dict[str, dict] = {}
        self.projects: set[str] = set()
        self._numbers = count(1)

    def run(self, variables):
        """The run that variables name, under any of the names that W&B's clients use."""
        entity = variables.get("entity") or variables.get("entityName") or ENTITY
        project = variables.get("project") or variables.get("projectName") or variables.get("model") or ""
        name = variables.get("run") or variables.get("runName") or variables.get("name")
        return self.runs.get((entity, project, name))

    def root(self):
        """The resolvers of the schema's root fields."""
        return {
            "__schema": {"types": []},
            "viewer": self._user(),
            "serverInfo": {
                "features": [{"name": name, "isEnabled": True} for name in FEATURES],
                "cliVersionInfo": {"max_cli_version": "9.9.9"},
                "latestLocalVersionInfo": None,
            },
            "entity": {
                "id": "entity", "name": ENTITY, "organization": {"coreWeaveOrganizationId": None, "name": "org"},
                "xxhashDigestsEnabled": False,
            },
            "organization": {"featureFlags": []},
            "model": self._model,
            "project": self._project,
            "clientIDMapping": None,
            "upsertBucket": self._upsert_bucket,
            "createRunFiles": self._create_run_files,
            "markRunFilesUploaded": {"success": True},
            "notifyScriptableRunAlert": self._alert,
            "createArtifact": self._create_artifact,
            "createArtifactManifest": self._create_manifest,
            "createArtifactFiles": self._create_artifact_files,
            "commitArtifact": self._commit,
            "artifact": lambda v: self._artifact_node(self.artifacts.get(v["id"])),
            "artifactCollection": lambda v: {"aliases": connection([])},
            "upsertView": self._upsert_view,
            "view": lambda v: self.views.get(v.get("reportId")),
            "models": lambda v: connection([self._project_node(p) for p in self._projects()]),
            "upsertModel": self._upsert_project,
        }  # fmt: skip

    # ------------------------------------------------------------------ people and projects

    def _user(self):
        return {
            "id": "user", "entity": ENTITY, "username": "somebody", "name": "Somebody", "email": "", "flags": "{}",
            "admin": False, "teams": connection([{"name": ENTITY, "id": "t"}]), "apiKeys": connection([]),
            "defaultEntity": {"name": ENTITY}, "deletedAt": None,
        }  # fmt: skip

    def _projects(self):
        return sorted({project for _, project, _ in self.runs} | self.projects)

    def _upsert_project(self, v):
        name = v["input"]["name"]
        self.projects.add(name)
        return {"inserted": True, "model": self._project_node(name), "project": self._project_node(name)}

    def _project_node(self, name):
        return {
            "__typename": "Project", "description": "", "access": None, "views": "{}",
            "id": f"p-{name}", "internalId": "7", "name": name, "entityName": ENTITY, "createdAt": CREATED,
            "isBenchmark": False, "entity": {"id": "entity", "name": ENTITY}, "user": None, "readOnly": False,
        }  # fmt: skip

    def _model(self, v):
        project = v.get("project") or v.get("name")
        return {**self._project_node(project), "bucket": lambda v: self._run_node(self.run(v))}

    def _project(self, v):
        project = v.get("project") or v.get("projectName")
        runs = [run for (_, of, _), run in self.runs.items() if of == project]
        artifact = lambda v: self._artifact_node(self._by_name(v.get("name") or v.get("artifactName")))  # noqa: E731
        return {
            **self._project_node(project),
            "run": lambda v: self._run_node(self.run(v)),
            "runs": connection([self._run_node(run) for run in runs]),
            "runCount": len(runs),
            "artifact": artifact,
            "artifactType": {"name": "profile", "artifactCollection": None},
            "artifactCollection": lambda v: {
                "__typename": "ArtifactSequence",
                "artifactMembership": self._artifact_node(self._by_name(v["collection"])),
            },
            "artifactTypes": connection([]),
            "artifactCollectionMembership": None,
        }

    # ------------------------------------------------------------------ runs

    def _run_node(self, run):
        if run is None:
            return None
        keys = sorted({key for row in run.rows() for key in row})
        return {
            "id": f"r-{run.number}", "name": run.name, "displayName": run.display_name, "description": "", "notes": "",
            "tags": run.tags, "sweepName": None, "state": run.state, "group": run.group, "jobType": run.job_type,
            "config": json.dumps(run.config), "summaryMetrics": json.dumps(run.summary), "systemMetrics": "{}",
            "commit": None, "readOnly": False, "createdAt": CREATED, "heartbeatAt": CREATED, "user": self._user(),
            "historyLineCount": len(run.history), "eventsLineCount": len(run.events), "logLineCount": 0,
            "historyTail": json.dumps(run.history[-1:]), "eventsTail": json.dumps(run.events[-1:]),
            "wandbConfig": json.dumps({"t": run.config.get("_wandb", {}).get("value", {}).get("t", {})}),
            "projectId": 7, "project": self._project_node(run.project),
            "historyKeys": {"lastStep": len(run.history) - 1, "keys": {
                key: {"typeCounts": [{"type": "number", "count": 1}], "monotonic": False} for key in keys}},
            "history": lambda v: self._history(run, v),
            "sampledHistory": lambda v: self._sampled(run, v),
            "parquetHistory": lambda v: {
                "parquetUrls": [],
                "liveData": run.rows(),
            },
            "files": lambda v: connection(self._file_nodes(run, v)), "fileCount": len(run.files),
            "outputArtifacts": lambda v: connection(
                [self._artifact_node(a) for a in run.artifacts if a.state == "COMMITTED"]),
            "inputArtifacts": connection([]),
        }  # fmt: skip

    def _history(self, run, v):
        low, high = v.get("minStep", 0), v.get("maxStep", 1 << 60)
        return [line for line in run.history if low <= json.loads(line)["_step"] < high]

    def _sampled(self, run, v):
        specs = v.get("specs") or [v["spec"]]
        answers = []
        for spec in map(json.loads, specs):
            keys = spec.get("keys") or []
            rows = [row for row in run.rows() if all(key in row for key in keys)]
            answers.append([{key: row[key] for key in keys} if keys else row for row in rows])
        return answers

    def _file_nodes(self, run, v):
        names = v.get("fileNames") or list(run.files)
        return [
            {
                "id": f"f-{name}", "name": name, "sizeBytes": len(run.files[name]), "md5": "", "mimetype": "",
                "updatedAt": CREATED, "uploadUrl": None,
                "url": f"{self.url}/blob/run/{run.number}/{quote(name)}",
                "directUrl": f"{self.url}/blob/run/{run.number}/{quote(name)}", "displayName": name, "digest": "",
            }
            for name in names if name in run.files
        ]  # fmt: skip

    def _upsert_bucket(self, v):
        run = next((r for r in self.runs.values() if f"r-{r.number}" == v.get("id")), None)
        inserted = False
        if run is None:
            key = (v.get("entity") or ENTITY, v.get("project") or "uncategorized", v["name"])
            inserted = key not in self.runs
            run = self.runs.setdefault(key, Run(*key, number=next(self._numbers)))
            if inserted or run.exit_code is not None:  # else it is the configuration of a run that goes on
                run.exit_code, run.preempting = None, False
                run.starts += 1
        run.display_name = v.get("displayName") or run.display_name
        run.group, run.job_type = v.get("groupName") or run.group, v.get("jobType") or run.job_type
        run.tags = v.get("tags") or run.tags
        if v.get("config"):
            run.config |= json.loads(v["config"])
        if v.get("summaryMetrics"):
            run.summary = json.loads(v["summaryMetrics"])
        return {"bucket": self._run_node(run), "inserted": inserted}

    def _create_run_files(self, v):
        run = self.run(v)
        files = [{"name": n, "uploadUrl": f"{self.url}/blob/run/{run.number}/{quote(n)}"} for n in v["files"]]
        return {"runID": f"r-{run.number}", "uploadHeaders": [], "files": files}

    def _alert(self, v):
        self.run(v).alerts.append({key: v[key] for key in ("title", "text", "severity")})
        return {"success": True}

    # ------------------------------------------------------------------ artifacts

    def _create_artifact(self, v):
        v = v["input"]
        run = self.run(v)
        number = next(self._numbers)
        name = v["artifactCollectionName"]
        digest = v.get("digest") or ""
        artifact = Artifact(number, run, name, v["artifactTypeName"], digest)
        artifact.version = sum(a.name == name for a in run.artifacts)
        run.artifacts.append(artifact)
        self.artifacts[f"a-{number}"] = artifact
        node = {"id": f"a-{number}", "state": "PENDING", "artifactSequence": {"latestArtifact": None}}
        return {"artifact": node}

    def _create_manifest(self, v):
        url = f"{self.url}/blob/manifest/{v['artifactID']}/{v['name']}"
        return {"artifactManifest": {"id": "m", "file": {"id": "mf", "uploadUrl": url, "uploadHeaders": []}}}

    def _create_artifact_files(self, v):
        nodes = [
            {
                "storagePath": f"{spec['artifactID']}/{spec['name']}", "uploadHeaders": [],
                "uploadUrl": f"{self.url}/blob/artifact/{spec['artifactID']}/{quote(spec['name'])}",
                "uploadMultipartUrls": None, "artifact": {"id": spec["artifactID"]},
            }
            for spec in v["input"]["artifactFiles"]
        ]  # fmt: skip
        return {"files": connection(nodes)}

    def _commit(self, v):
        artifact = self.artifacts[v["artifactID"]]
        wanted = json.loads(artifact.manifest)["contents"]
        missing = [name for name in wanted if name not in artifact.files]
        if missing:
            raise ValueError(f"artifact {artifact.name} was committed without {missing}")
        artifact.state = "COMMITTED"
        return {"artifact": self._artifact_node(artifact)}

    def _by_name(self, name):
        name = name.split("/")[-1].partition(":")[0]
        return next((a for a in reversed(list(self.artifacts.values())) if a.name == name), None)

    def _artifact_node(self, a):
        if a is None:
            return None
        project = self._project_node(a.run.project)
        sequence = {
            "__typename": "ArtifactSequence", "id": f"s-{a.name}", "name": a.name, "project": project,
            "latestArtifact": None,
        }  # fmt: skip
        alias = {"__typename": "ArtifactAlias", "id": "latest", "alias": "latest", "artifactCollection": sequence}
        manifest = f"{self.url}/blob/manifest/a-{a.number}/wandb_manifest.json"
        files = [
            {
                "__typename": "File", "id": n, "name": n, "displayName": n,
                "sizeBytes": len(c), "digest": "", "md5": "", "mimetype": "",
                "updatedAt": CREATED, "storagePath": n, "url": None,
                "directUrl": f"{self.url}/blob/artifact/a-{a.number}/{quote(n)}",
            }
            for n, c in a.files.items()
        ]  # fmt: skip
        return {
            "__typename": "Artifact", "id": f"a-{a.number}", "state": a.state, "digest": a.digest, "description": None,
            "metadata": "{}", "ttlDurationSeconds": -2, "ttlIsInherited": True, "versionIndex": a.version,
            "size": sum(map(len, a.files.values())), "fileCount": len(a.files), "commitHash": str(a.number),
            "createdAt": CREATED, "updatedAt": CREATED, "historyStep": None, "tags": [], "usedCount": 0,
            "artifactType": {"id": a.type, "name": a.type}, "artifactSequence": sequence,
            "aliases": [{**alias, "artifactCollectionName": a.name}], "artifactAliases": [alias],
            "currentManifest": {"id": "m", "digest": a.digest, "file": {"id": "mf", "directUrl": manifest}},
            "createdBy": {"__typename": "Run", "id": f"r-{a.run.number}", "name": a.run.name, "project": project},
            "artifactMemberships": connection([]), "files": connection(files), "name": f"{a.name}:v{a.version}",
        }  # fmt: skip

    # ------------------------------------------------------------------ reports and workspaces

    def _upsert_view(self, v):
        name = v.get("id") or base64.b64encode(f"View:{next(self._numbers)}".encode()).decode()
        view = {
            "id": name, "type": v.get("type"), "name": v.get("name"), "displayName": v.get("displayName"),
            "description": v.get("description"), "spec": v["spec"], "updatedAt": CREATED, "createdAt": CREATED,
            "project": self._project_node(v["projectName"]), "user": self._user(),
        }  # fmt: skip
        inserted = name not in self.views
        self.views[name] = view
        return {"view": view, "inserted": inserted}
