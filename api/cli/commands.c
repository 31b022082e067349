/* commands.c: the table of dcpctl's commands and options: the command line, --help, the manual page and the completions are made of these
 * rows and of those of the job kinds (spec/kinds.def, spec/fields.def), so that none of them can say what another does not. */
#include <stdio.h>
#include <string.h>

#include "api/cli/commands.h"
#include "spec/fields.h"

#define WAITING "detach dry-run "

/* Commands that are no job kind; those of the kinds are made of their rows. */
static const struct command commands[] = {
	{ "status",
	  "status",
	  "",
	  "the daemon, its storages and workers",
	  "The daemon, what confines its workers to the storages (sandbox), its storages and workers.",
	  0, 0, look_status },
	{ "doctor",
	  "doctor",
	  "",
	  "what this host lacks, each with the command that mends it; exit 1 if something is in the way of a save",
	  "What the daemon's host lacks for saves and loads: shared memory, limits, io_uring, O_DIRECT, Landlock, the clock, drivers, each "
	  "with the command that mends it. Exit status 1 if something is in the way of a save. Where no daemon answers and --url names "
		"none, "
	  "this host is looked at by dcpd --doctor.",
	  0, 0, doctor_show },
	{ "ls",
	  "ls [STORAGE[:PREFIX] | shm:] [--run RUN] [--filter 'step>=100 AND held=true'] [--sort -time] [--limit N]",
	  "run= filter= sort= limit=",
	  "checkpoints, or state dicts in shared memory",
	  "Checkpoints, or state dicts in shared memory, by name; numbers in names by their value. Terms of a filter are joined by AND: "
	  "step>=100, metrics.loss<1.5, labels.team=vision, name=run1/*, run=run*, format=dcp, verified=verified, held=true, dcpd=true, "
	  "bytes>1e9, world_size=8, time>=2026-11-23, content_digest=HEX; values may stand in quotes. A key to sort by is name, time, "
	  "step, bytes or metrics.NAME, with a - in front the greatest first; it needs a storage. VERIFIED says what is known of a "
	  "checkpoint's bytes: state (verified, damaged, or unverified if there was nothing to compare with), level and time; - if "
	  "nothing is, or if the checkpoint is another one since.",
	  0, 1, look_ls },
	{ "show",
	  "show REF | shm:NAME [--tensors GLOB]",
	  "tensors=",
	  "one checkpoint or state dict, or its tensors",
	  "One checkpoint or state dict, or those of its tensors and values whose FQN matches. Of a checkpoint also what is known of its "
	  "bytes, as for ls, and which job found it out.",
	  1, 1, look_show },
	{ "cat",
	  "cat REF FQN [--slice 0:4,:] [--format raw|npy|safetensors] [--verify digest|none]",
	  "slice= format= verify=",
	  "a tensor's values; with --format its bytes",
	  "A tensor's values as text, one line for each run of the last dim; with --format its bytes.",
	  2, 2, cat_tensor },
	{ "image",
	  "image shm:NAME FILE|DIR [--rank N] [--generation N]",
	  "rank= generation=",
	  "a state dict in shared memory as safetensors files, as it is now",
	  "What a state dict in shared memory holds, as safetensors files: with --rank the image of that rank as FILE, else all as a new "
	  "folder DIR, with their digests, which is a checkpoint to dcpd. The newest generation that all ranks sealed, or --generation.",
	  2, 2, image_save },
	{ "rm",
	  "rm REF | shm:NAME [--trash TIME] [--yes] [--detach]",
	  "trash= yes detach",
	  "delete a checkpoint or a state dict, for good or into the trash; asks first on a terminal, unless --yes",
	  "Delete a checkpoint (a job) or a state dict. On a terminal it asks first. With --trash the checkpoint can be had back for so "
	  "long (72h, 30d).",
	  1, 1, look_rm },
	{ "trash",
	  "trash STORAGE[:NAME]",
	  "",
	  "deleted checkpoints that may come back, newest first",
	  "Deleted checkpoints that may come back, newest first, with who deleted them, by which policy, and until when they are kept.",
	  1, 1, keep_trash },
	{ "undelete",
	  "undelete REF [--id ID]",
	  "id=",
	  "bring back what was deleted under this name last, or what has the id",
	  "Bring back what was deleted under this name last, or what has the id. A name that is taken is refused.",
	  1, 1, keep_undelete },
	{ "runs",
	  "runs [STORAGE[:RUN]] [--mtbf 24h] [--filter TERMS] [--sort KEY] [--limit N]",
	  "mtbf= filter= sort= limit=",
	  "the runs of a storage, or one run's checkpoints, newest first, and how often it should save",
	  "The runs of a storage, or of all: what checkpoints' names have in common before the last component, run1 of run1/step-100. Of "
	  "one run its checkpoints, the newest first, which is the latest one, which the latest verified one, which are held, since when "
	  "work would be lost if the training ended now, and how often it should save if it fails once in the time of --mtbf (90s, 30m, "
	  "24h, 7d; a day). Filter and order of one run's checkpoints are those of ls.",
	  0, 1, look_runs },
	{ "resume",
	  "resume STORAGE:RUN [--world-size N] [--layout RULE]... [--attempts N] [--any-optimizer] [--look]",
	  "world-size= layout= attempts= any-optimizer look",
	  "what a training goes on from: the newest checkpoint that loads and was not tried too often; exit 6 if there is none yet",
	  "Print the reference of the checkpoint that a training goes on from, and nothing else, on standard output: the newest of the "
	  "run that can be loaded. What was skipped, and why, is said on standard error. Each call counts an attempt; after three (or "
	  "--attempts, 0: without limit) with one checkpoint, and no newer one since, the one before is next. --look counts nothing. "
	  "--any-optimizer takes a checkpoint whose optimizer state is there for a part of a group only. Exit 6: the run has no "
	  "checkpoint yet. Exit 5: it has some, and none will do; a script must not begin anew then.",
	  1, 1, resume_print },
	{ "alias",
	  "alias STORAGE:RUN ALIAS NAME [--if NAME] | --remove",
	  "if= remove",
	  "let STORAGE:RUN@ALIAS stand for a checkpoint of the run",
	  "Let STORAGE:RUN@ALIAS stand for a checkpoint of the run wherever one is named (a NAME without a slash is of this run), or "
	  "remove the alias. With --if only if it leads to that checkpoint by now, or, with an empty name, nowhere. The aliases latest "
	  "and latest-verified are dcpd's own.",
	  2, 3, look_alias },
	{ "lineage",
	  "lineage REF",
	  "",
	  "what a checkpoint was made of, and what was made of it",
	  "What a checkpoint was made of, and what was made of it, as records tell; STATE says whether the parent is still the same, was "
	  "replaced or removed.",
	  1, 1, look_lineage },
	{ "hold",
	  "hold REF [--reason TEXT]",
	  "reason=",
	  "hold a checkpoint: nothing removes or replaces it",
	  "Hold a checkpoint: nothing of dcpd's removes or replaces it. The hold lies beside the checkpoint's files, so that a copy is "
	  "held, too.",
	  1, 1, look_hold },
	{ "unhold",
	  "unhold REF",
	  "",
	  "lift a checkpoint's hold",
	  "Lift a checkpoint's hold: for the hold's owner, root and dcpd's own user.",
	  1, 1, look_hold },
	{ "policy",
	  "policy NAME [--storage S --match RUN --keep-last N ...] [--preview] | --rm",
	  "storage= match= keep-last= keep-every-steps= keep-every= keep-best= ttl= bytes= trash= verified-only paused confirm preview rm",
	  "how long checkpoints of the runs that match are kept; with --preview what would go; without options the policy",
	  "How long checkpoints are kept: of the storage --storage the runs that --match names (* matches any characters). In each run "
	  "--keep-last N, --keep-every-steps N, --keep-every TIME and --keep-best METRIC:min|max:COUNT keep checkpoints; the others go "
	  "at once, or, with --ttl TIME, when they are older, and, with --bytes N, the oldest first while all have more. With "
	  "--verified-only only verified ones count, with --trash TIME those that go can be had back. A policy that is --paused removes "
	  "nothing. --preview shows what would go, and why each other one stays. "
	  "--confirm says that a pattern for no run or for every run is meant. Without options: the policy, "
	  "and what came of it.",
	  1, 1, keep_policy },
	{ "policies",
	  "policies",
	  "",
	  "retention policies, and what came of them",
	  "All policies.",
	  0, 0, keep_policies },
	{ "webhook",
	  "webhook NAME [--to URL --secret NAME --event EVENT... [--storage S] [--match RUN] | --deliveries | --test | --rm]",
	  "to= secret= event= storage= match= deliveries test rm",
	  "a URL that is told what happens: set it, look at it, try it",
	  "Let a URL be told of events such as checkpoint.durable, signed with a secret of the state directory; without options show the "
	  "webhook. The options --storage and --match (a glob) choose checkpoints; --deliveries lists what was sent, --test sends "
	  "webhook.test.",
	  1, 1, hooks_webhook },
	{ "webhooks",
	  "webhooks",
	  "",
	  "all webhooks", NULL,
	  0, 0, hooks_webhooks },
	{ "chain",
	  "chain NAME [--file FILE | --executions | --rm]",
	  "file= executions rm",
	  "jobs that follow each durable checkpoint of a run: set them from a JSON file, look at how they stand",
	  "Set the chain in a JSON file: jobs that follow each checkpoint of a run when it is durable. Without options show how it "
	  "stands, with --executions all executions that are kept.",
	  1, 1, hooks_chain },
	{ "chains",
	  "chains",
	  "",
	  "all chains", NULL,
	  0, 0, hooks_chains },
	{ "jobs",
	  "jobs [--filter 'state=running AND kind=save'] [--limit N]",
	  "filter= limit=",
	  "jobs, newest first",
	  "Jobs, newest first, with source and target. Terms of a filter are joined by AND: state=running, kind=save, labels.KEY=value, "
	  "target=main:run1/step-100.",
	  0, 0, jobs_list },
	{ "job",
	  "job ID [--follow]",
	  "follow",
	  "one job",
	  "One job; --follow waits for its end.",
	  1, 1, jobs_one },
	{ "transforms",
	  "transforms [NAME]",
	  "",
	  "ready sets of conversion rules for --transform NAME, or the rules of one",
	  "The ready sets of conversion rules that --transform NAME takes, or the rules of one.",
	  0, 1, look_transforms },
	{ "cancel",
	  "cancel ID",
	  "",
	  "cancel a job",
	  "Cancel a job. A job that is committing cannot be cancelled any more.",
	  1, 1, jobs_act },
	{ "retry",
	  "retry ID",
	  "",
	  "run a failed or cancelled job again", NULL,
	  1, 1, jobs_act },
	{ "events",
	  "events [ID]",
	  "",
	  "what happens, as it happens; of one job with ID", NULL,
	  0, 1, jobs_events },
	{ "audit",
	  "audit [--limit N]",
	  "limit=",
	  "who changed what, newest first: deletes, aliases, holds, policies, chains, webhooks",
	  "Who changed what, newest first (100 rows unless --limit says otherwise): deletes by callers and by policies, aliases, holds, "
	  "policies, chains, webhooks and storages, with uid or name of the token, and the job. For root, dcpd's own user and tokens with "
	  "the scope admin.",
	  0, 0, look_audit },
	{ "nodes",
	  "nodes",
	  "",
	  "the nodes of the cluster",
	  "The nodes of the cluster, as the one that answers saw them last, with the jobs that have not ended. STATE is joined, draining, "
	  "drained, or away: etcd has not heard of it for longer than --cluster-ttl.",
	  0, 0, look_nodes },
	{ "publications",
	  "publications",
	  "",
	  "publications and their subscribers, with versions and lag",
	  "Publications (weights that a trainer publishes) and their subscribers. VERSION is the newest that all ranks have, APPLIED the "
	  "one that all ranks of a subscriber use, NODE where it is if that is another one, LAG for how many seconds it has lacked the "
	  "publication's newest, CHANGED how much of its last update differed from the version before.",
	  0, 0, look_publications },
	{ "kept",
	  "kept [shm:NAME]",
	  "",
	  "weights that are kept in the memory of GPUs, for engines that start again",
	  "Device images: what keep has made, and dcpd.keep of the Python package. STATE is filling, kept, dropped (an engine has it "
	  "still), or lost with its PROBLEM. ATTACHED is the number of engines that have it; BYTES are device memory; it goes at EXPIRES "
	  "if no engine has it then.",
	  0, 1, look_device_images },
	{ "keep",
	  "keep shm:NAME [--rank N] [--generation N] [--device GPU-UUID] [--ttl TIME]",
	  "rank= generation= device= ttl=",
	  "keep a sealed state dict's rank in a GPU's memory, for engines that start again",
	  "Copy one rank of a sealed state dict (rank 0; the newest generation that all ranks sealed) into memory of a GPU, where it "
	  "outlives the engines that map it (dcpd.attach with a device). An older generation of the same rank there is dropped. Without "
	  "an engine it goes after --ttl (0: when it is dropped; default: as long as --keep-sealed). Prints its id.",
	  1, 1, look_keep },
	{ "drop",
	  "drop ID",
	  "",
	  "drop a device image", "Drop a device image: no engine gets it any more. Its memory is free when those that have it have ended.",
	  1, 1, look_drop },
	{ "drain",
	  "drain STORAGE:RUN | NODE [--wait 60s]",
	  "wait=",
	  "wait until a run's saves are durable; or give a node of the cluster no new work",
	  "Of a run: wait until its saves are durable, before a host lets its processes go (Slurm's epilog, Kubernetes' preStop). "
	  "Exit 4 if some are left after --wait, 5 if one of them has failed. Of a node: give it no new work, until it is undrained. "
	  "Jobs that it has go on; with --wait it waits for their end; exit 4 if some are left then.",
	  1, 1, look_drain },
	{ "undrain",
	  "undrain NODE",
	  "",
	  "give a node work again", NULL,
	  1, 1, look_drain },
	{ "forget",
	  "forget NODE",
	  "",
	  "forget a node of the cluster that will not come back",
	  "Only a node that is away. Its jobs that no other node can take over have failed. A node that comes back all the same joins "
	  "anew.",
	  1, 1, look_forget },
	{ "check",
	  "check REF [shm:NAME] [--world-size N] [--layout RULE]... [--no-strict]",
	  "include= exclude= rename= dtype= world-size= layout= no-strict",
	  "can the checkpoint be loaded so, or into that state dict? Nothing is read but metadata; exit 1 if not",
	  "Can the checkpoint be loaded so, or into that state dict? Every key that does not fit is listed: missing, another size or "
	  "kind, a dtype that cannot be cast, a layout that it cannot have, a hole in what is stored. Nothing but metadata is read; exit "
	  "status 1 if it cannot.",
	  1, 2, jobs_check },
	{ "completion",
	  "completion bash|zsh|fish",
	  "",
	  "print the completions for a shell: source <(dcpctl completion bash)",
	  "Print the completions for a shell, such as with source <(dcpctl completion bash). They know commands, options, values, and the "
	  "names of checkpoints, runs, state dicts and jobs, as long as a daemon is there.",
	  1, 1, complete_script },
	{ "manual",
	  "manual",
	  "",
	  "print the manual page dcpctl(1): dcpctl manual | man -l -",
	  NULL,
	  0, 0, help_manual },
	{ "explain",
	  "explain [CODE]",
	  "",
	  "what an error's code means, and what to do; without CODE all codes",
	  "What an error's code, such as storage_full, means, what to do about it, and whether the same may go well later. Without CODE "
	  "all codes. It needs no daemon.",
	  0, 1, explain_code },
	{ "tree",
	  "tree REF | shm:NAME [--depth N] [--tensors GLOB]",
	  "depth= tensors=",
	  "the tensors as a tree of modules, with what each of them weighs",
	  NULL,
	  1, 1, tree_show },
	{ "plot",
	  "plot REF | shm:NAME FQN",
	  "",
	  "how a tensor is cut over ranks and files, as a picture",
	  "How a tensor is cut over ranks and files: a box for each chunk, to scale, with the ranks that hold it, and below it where each "
	  "chunk lies. Of a tensor with more than two dims those that are cut most are drawn.",
	  2, 2, plot_show },
	{ "watch",
	  "watch STORAGE:RUN | ID [--interval 2s] [--count N]",
	  "interval= count=",
	  "a run's checkpoints as they come, or a job until its end",
	  "A run's checkpoints as they come, until Ctrl-C: on a terminal the screen is drawn anew, elsewhere a line tells each change. "
	  "With the ID of a job its progress until its end.",
	  1, 1, watch_one },
	{ "top",
	  "top [--interval 2s] [--count N]",
	  "interval= count=",
	  "what happens now, on one screen: jobs, storages, shared memory, work that would be lost; q quits",
	  NULL,
	  0, 0, top_show },
};

/* Options of the commands that are no job kind. One with a command's name is that command's alone and goes before the others. */
static const struct command_option options[] = {
	{ NULL, "json", NULL, "print the API's object; a failure's problem too" },
	{ NULL, "output", "table|json|ndjson|csv", "the form of lists; json is --json" },
	{ NULL, "columns", "NAME,...", "columns of a list, in this order: titles, or members of its JSON objects, such as progress.rate" },
	{ NULL, "timeout", "90s", "stop waiting after this time (exit status 4); a job goes on" },
	{ NULL, "url", "URL", "the daemon: http://HOST:PORT, https://HOST:PORT or unix:///PATH" },
	{ NULL, "help", NULL, "print what the command does and its options" },
	{ NULL, "detach", NULL, "print the job's id and do not wait" },
	{ NULL, "dry-run", NULL, "print the plan; nothing runs" },
	{ "jobs", "filter", "TERMS", "terms joined by AND: state=running, kind=save, labels.KEY=value, target=main:run1/step-100" },
	{ NULL, "filter", "TERMS", "terms joined by AND, such as 'step>=100 AND verified=verified'" },
	{ NULL, "sort", "KEY", "name, time, step, bytes or metrics.NAME; with a - in front the greatest first" },
	{ NULL, "limit", "N", "so many at most" },
	{ NULL, "run", "RUN", "of this run only" },
	{ NULL, "mtbf", "TIME", "how often the training fails, such as 24h: what the advice on saving counts with" },
	{ NULL, "tensors", "GLOB", "the tensors and values whose FQN matches; * matches any run of characters" },
	{ NULL, "depth", "N", "levels of the tree" },
	{ NULL, "interval", "TIME", "between two looks, such as 500ms; default 2s" },
	{ NULL, "count", "N", "end after so many looks; default: go on, but for top without a terminal, which looks once" },
	{ NULL, "slice", "0:4,:", "a part of the tensor" },
	{ NULL, "format", "raw|npy|safetensors", "bytes in this form instead of text" },
	{ NULL, "verify", "digest|none", "whether all that is sent was compared with digests" },
	{ "keep", "rank", "N", "the rank; default 0" },
	{ "keep", "device", "GPU-UUID", "the GPU, as nvidia-smi -L names it; default: the only one" },
	{ "keep", "ttl", "TIME", "without an engine it goes after so long, such as 30m; 0: when it is dropped" },
	{ NULL, "rank", "N", "of this rank only" },
	{ NULL, "generation", "N", "the sealed generation; default: the newest that all ranks sealed" },
	{ NULL, "trash", "TIME", "it can be had back for so long, such as 72h or 30d" },
	{ NULL, "yes", NULL, "do not ask" },
	{ NULL, "id", "ID", "of the deleted checkpoint, as dcpctl trash lists it" },
	{ NULL, "world-size", "N", "ranks that load; default: as the layout says, else the source's" },
	{ NULL, "layout", "RULE", "PATTERN=PLACEMENTS@MESH[:RANKS]; may be repeated, the first rule that matches wins" },
	{ NULL, "attempts", "N", "starts with one checkpoint before the one before it is taken; 0: without limit" },
	{ NULL, "any-optimizer", NULL, "also if the optimizer state is there for a part of a group only" },
	{ NULL, "look", NULL, "count no attempt" },
	{ NULL, "if", "NAME", "only if the alias leads to this checkpoint by now; empty: nowhere" },
	{ NULL, "remove", NULL, "remove the alias" },
	{ NULL, "reason", "TEXT", "why it is held" },
	{ NULL, "storage", "STORAGE", "of this storage" },
	{ NULL, "match", "GLOB", "runs that match; * matches any run of characters" },
	{ NULL, "keep-last", "N", "the newest N of each run stay" },
	{ NULL, "keep-every-steps", "N", "one of each N steps stays" },
	{ NULL, "keep-every", "TIME", "one of each such time stays" },
	{ NULL, "keep-best", "METRIC:min|max:COUNT", "the best by a metric stay" },
	{ NULL, "ttl", "TIME", "the others go when they are older" },
	{ NULL, "bytes", "N", "the oldest of the others go while all have more bytes" },
	{ NULL, "verified-only", NULL, "only verified checkpoints count" },
	{ NULL, "paused", NULL, "the policy removes nothing until it is put without this" },
	{ NULL, "confirm", NULL, "a pattern for no run, or for every run, is meant" },
	{ NULL, "preview", NULL, "what would go, and why each other one stays; nothing is changed" },
	{ NULL, "rm", NULL, "remove it" },
	{ NULL, "to", "URL", "where it is sent" },
	{ NULL, "secret", "NAME", "file in $STATE/secrets that signs it" },
	{ NULL, "event", "EVENT", "such as checkpoint.durable; may be repeated" },
	{ NULL, "deliveries", NULL, "what was sent" },
	{ NULL, "test", NULL, "send webhook.test" },
	{ NULL, "file", "FILE", "the chain as JSON" },
	{ NULL, "executions", NULL, "all executions that are kept" },
	{ NULL, "wait", "TIME", "until its jobs have ended, so long at most; of a run 60s unless it is given" },
	{ NULL, "follow", NULL, "wait for its end" },
	{ NULL, "include", "GLOB", "only FQNs that match; may be repeated" },
	{ NULL, "exclude", "GLOB", "not the FQNs that match; may be repeated" },
	{ NULL, "rename", "s/PATTERN/REPLACEMENT/", "change FQNs; may be repeated" },
	{ NULL, "dtype", "GLOB=DTYPE", "cast tensors; may be repeated" },
	{ NULL, "no-strict", NULL, "keys that the checkpoint lacks are no mismatch" },
};

/* More than their rows say of some job kinds. */
static const struct {
	const char *command, *more;
} kinds_more[] = {
	{ "load",
	  "A checkpoint into shared memory. A state dict that exists is filled by its own layout." },
	{ "verify",
	  "Is the checkpoint whole and unchanged? All that is damaged is listed (the first 20 places; with --json the first 1,000), and "
	  "ls, show and the page mark the checkpoint with what was found until it is another one." },
	{ "diff",
	  "What differs between two checkpoints or state dicts, whatever their formats and layouts; exit status 1 if anything does. Keys "
	  "that are missing, and tensors of another shape or dtype, come first; then the tensors that moved most (--top), by the norm of "
	  "the difference relative to A's, with the cosine of the angle between both, the largest difference, and how many elements and "
	  "bits changed; then how much is unchanged. Tensors that the digests on record prove equal are not read, unless --read-all is "
	  "given." },
	{ "compare",
	  "What differs in structure, dtype and size; with --values in values, too. Exit status 1 if anything does." },
	{ "stats",
	  "What the numbers of each tensor are like: smallest, largest and mean, the L2 norm, how many are zeros, NaN or infinite; with "
	  "--json a histogram, too. NaN and infinite elements are in none of the other figures. Bytes are compared with their digests; "
	  "what was counted before, by a worker that is still warm, is not read again." },
	{ "merge",
	  "The weighted average of 2 to 16 checkpoints, whatever their layouts and formats. Elements are added up in 32 bits, or 64, and "
	  "rounded once, to the dtype that --transform gives the tensor, else that of the first checkpoint's. Tensors of integers and "
	  "bools, values, and what --first-only matches (such as the optimizer's state) are the first checkpoint's; --exclude leaves "
	  "them out." },
	{ "inspect",
	  "What would unpickling it have run? Every pickle is followed and none is run: of .metadata, of each item, of .pt, .bin and the "
	  "like, in archives, behind one another and inside of one another. What is no data by PyTorch's, NumPy's or Python's own "
	  "account is listed with module, name, file, record and offset; so is what could not be followed to its end. Exit status 1 if "
	  "anything but data would have run, or might have. The checkpoint need not be one that dcpd reads." },
	{ "repair",
	  "Makes lost or damaged .metadata anew, and restores damaged parts of files. What dcpd wrote says itself which tensors it "
	  "holds; for PyTorch's own name a checkpoint of the same layout, such as the run's step before. Damaged bytes are taken from "
	  "replicas in the checkpoint, or from the one that is named, whatever its layout and format, and only if they have the digest "
	  "or CRC32 that was recorded of them. Each file is replaced in one step; a repair that is stopped has lost nothing. What is not "
	  "known is listed; exit status 1 if damage is left. Metadata that were lost become visible only if everything that they tell of "
	  "is whole." },
	{ "delta",
	  "How NEW differs from BASE, compressed: the checkpoint OUT, of format delta, in the form that slime writes and SGLang applies. "
	  "Both have the same tensors, in any layouts and formats; either may be a state dict (shm:NAME), or two generations of one. "
	  "Values of NEW travel in the index." },
	{ "apply",
	  "What the delta was made of, bit for bit. BASE and OUT may be shm:NAME (OUT as of a load). The base's content digest is "
	  "compared with the delta's before anything is written, and every new tensor with its checksum." },
	{ "cp",
	  "A copy of a checkpoint of any format, byte for byte, in the same storage or another. Every file of its folder comes along (a "
	  "hold does not), each byte is compared with its digest on the way, and a source that changes meanwhile leaves no copy." },
	{ "materialise",
	  "Gives a checkpoint bytes of its own where incremental saves let it share some with others. Files are copied one after the "
	  "other, compared with the manifest on the way, and each takes the place of the shared one in one step. Where the file system "
	  "has clones of blocks all files are copied." },
};

static const char *more_of(const char *command)
{
	for (size_t i = 0; i < sizeof kinds_more / sizeof *kinds_more; i++)
		if (strcmp(kinds_more[i].command, command) == 0)
			return kinds_more[i].more;
	return NULL;
}

/* The command of a job kind, by its row of kinds.def and its fields' rows. The texts are good until the next call. */
static struct command command_of(enum job_kind kind)
{
	static char usage[256], names[1024];
	const struct kind *k = kind_of(kind);
	size_t n = (size_t)snprintf(names, sizeof names, WAITING);
	unsigned words = 1, optional = 0;

	snprintf(usage, sizeof usage, "%s %s [OPTION]...", jobs_command(kind), k->arguments);
	for (const char *p = k->arguments; *p; p++) {
		words += *p == ' ';
		optional += *p == '[';
	}
	unsigned most = strstr(k->arguments, "...") ? words - 2 + SPEC_SOURCES_MAX : words;
	for (const struct field *f = field_next(kind, NULL); f; f = field_next(kind, f))
		if (f->option && n < sizeof names)
			n += (size_t)snprintf(names + n, sizeof names - n, "%s%s ", f->option, f->type == FIELD_BOOL ? "" : "=");
	must(n < sizeof names);
	return (struct command){ jobs_command(kind), usage, names, k->what, more_of(jobs_command(kind)), words - optional, most,
				 jobs_submit };
}

/* A kind that removes has a command of its own: rm. */
static bool has_command(enum job_kind kind)
{
	return !kind_is(kind, KIND_REMOVES);
}

bool commands_at(unsigned index, struct command *out)
{
	unsigned n = sizeof commands / sizeof *commands;

	if (index < n) {
		*out = commands[index];
		return true;
	}
	for (int k = 0; k < JOB_KIND_COUNT; k++)
		if (has_command((enum job_kind)k) && index-- == n) {
			*out = command_of((enum job_kind)k);
			return true;
		}
	return false;
}

bool commands_find(struct str name, struct command *out)
{
	for (unsigned i = 0; commands_at(i, out); i++)
		if (str_is(name, out->name))
			return true;
	return false;
}

/* ---- options ---- */

static const struct command_option *row_of(const char *command, struct str name)
{
	for (size_t i = 0; i < sizeof options / sizeof *options; i++)
		if (str_is(name, options[i].name) && (!options[i].command || (command && strcmp(options[i].command, command) == 0)))
			return &options[i];
	return NULL;
}

/* A field's row as an option's; its words are what the value may be. */
static struct command_option of_field(const struct field *f)
{
	static char words[256];
	size_t n = 0;

	for (size_t i = 0; f->words && f->words[i] && n < sizeof words; i++)
		n += (size_t)snprintf(words + n, sizeof words - n, "%s%s", i ? "|" : "", f->words[i]);
	return (struct command_option){ NULL, f->option, f->value ? f->value : f->words ? words : NULL, f->what };
}

bool commands_option(const struct command *k, unsigned index, struct command_option *out)
{
	const char *lists[] = { k->options, args_global };
	enum job_kind kind;

	for (size_t l = 0; l < sizeof lists / sizeof *lists; l++)
		for (const char *p = lists[l]; *p;) {
			size_t w = strcspn(p, " "), n = w - (p[w - 1] == '=');
			struct str name = { p, n };
			p += w + strspn(p + w, " ");
			if (index-- > 0)
				continue;
			const struct command_option *row = NULL;
			const struct field *f = jobs_kind(k->name, &kind) ? field_next(kind, NULL) : NULL;
			while (f && !(f->option && str_is(name, f->option)))
				f = field_next(kind, f);
			if (!f)
				row = row_of(k->name, name);
			must(f || row);
			*out = f ? of_field(f) : *row;
			return true;
		}
	return false;
}
