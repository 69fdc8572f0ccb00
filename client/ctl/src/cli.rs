//! The command line: what can be typed, and nothing of what it does.

use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand};
use rocmforge_client::proto::Budget;
use rocmforge_client::proto::v1::{CachePolicy, Pooling};

use crate::commands::pull::{HubArgs, PullArgs, RmArgs};
use crate::commands::why::WhyArgs;
use crate::sampling::{SamplingArgs, text_or_file};
use crate::top::args::TopArgs;

/// Controls a rocmforged: loads models, generates text, manages the cache.
#[derive(Debug, Parser)]
#[command(
    name = "rocmforgectl",
    version,
    max_term_width = 100,
    after_help = "Exit codes: 0 success; 1 failure; 2 wrong usage; 3 no daemon to talk to; 4 not now, try again later; \
                  5 no such model or file; 6 the request or the file cannot work; 7 not allowed. With --json, errors \
                  but those of usage are one JSON object on standard error."
)]
pub(crate) struct Cli {
    /// Socket of the daemon [default: $ROCMFORGE_SOCKET, else
    /// $XDG_RUNTIME_DIR/rocmforged.sock, else /run/rocmforged/rocmforged.sock]
    #[arg(long, global = true, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,

    /// Print JSON: one object, or one a line while text is generated
    #[arg(long, global = true)]
    pub(crate) json: bool,

    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Cli {
    /// Refuses what clap cannot: conflicts of a command with a common flag, which
    /// may stand before the command.
    pub(crate) fn checked(self) -> Result<Cli, clap::Error> {
        match &self.command {
            Command::Run(args) if args.private && self.socket.is_some() => {
                let message = "--private starts a daemon of its own; leave out --socket";
                Err(Cli::command().error(ErrorKind::ArgumentConflict, message))
            }
            _ => Ok(self),
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Load a GGUF file under a name
    Load(LoadArgs),
    /// Unload a model and free its memory
    Unload {
        /// Name of the model
        name: String,
        /// Cancel the requests of the model and remove its pins, instead of failing
        #[arg(long)]
        force: bool,
    },
    /// Download a model from a hub into a model directory; resumes an interrupted download
    Pull(PullArgs),
    /// Delete a model file, all parts of a split one, and what unfinished downloads left of it
    Rm(RmArgs),
    /// List the loaded models, or what a hub has of one
    Ls {
        /// List the files of OWNER/REPO on the hub, or of an Ollama name
        #[arg(long, value_name = "SOURCE")]
        remote: Option<String>,
        #[command(flatten)]
        hub: HubArgs,
    },
    /// Show a model: architecture, file, quantization, resident segments
    Show {
        /// Name of the model
        name: String,
    },
    /// Generate a completion of a raw prompt, without a chat template
    Generate {
        /// Name of the model
        name: String,
        /// The text; "-" reads it from the standard input, exactly as it comes
        #[arg(required_unless_present = "ids")]
        prompt: Option<String>,
        /// Token ids in place of a text, as in 1,15043
        #[arg(long, value_name = "LIST", value_delimiter = ',', conflicts_with_all = ["prompt", "no_add_special", "no_parse_special"])]
        ids: Vec<u32>,
        #[command(flatten)]
        special: SpecialArgs,
        #[command(flatten)]
        sampling: SamplingArgs,
    },
    /// Talk to a model through its chat template
    Chat {
        /// Name of the model
        name: String,
        /// What to say; "-" reads it from the standard input, without its last
        /// line break; without it, a conversation until Ctrl-D
        message: Option<String>,
        #[command(flatten)]
        chat: ChatArgs,
        #[command(flatten)]
        sampling: SamplingArgs,
    },
    /// Load a file and answer one prompt through its chat template, in a running
    /// daemon or one started for the occasion
    Run(RunArgs),
    /// Compute embeddings of texts
    Embed {
        /// Name of the model
        name: String,
        /// The texts
        #[arg(required_unless_present = "ids")]
        texts: Vec<String>,
        /// Token ids in place of texts, as in 1,15043
        #[arg(
            long,
            value_name = "LIST",
            value_delimiter = ',',
            conflicts_with = "texts"
        )]
        ids: Vec<u32>,
        /// Pooling of the hidden states [default: the configuration's, else the model file's, else
        /// mean for encoders and last for others]
        #[arg(long, value_enum)]
        pooling: Option<PoolingArg>,
        /// Truncate each embedding to this number of dimensions
        #[arg(long, value_name = "N", allow_negative_numbers = true)]
        dimensions: Option<i32>,
        /// Do not normalize the embeddings
        #[arg(long)]
        no_normalise: bool,
        /// What the texts are embedded for, such as query or document: the prompt that the
        /// configuration declares by this name is put before each text
        #[arg(long, value_name = "NAME")]
        input_type: Option<String>,
    },
    /// Rank documents by relevance to a query, with a reranker model
    Rerank {
        /// Name of the model
        name: String,
        /// The query
        query: String,
        /// The documents
        #[arg(required = true)]
        documents: Vec<String>,
        /// Show only the N best
        #[arg(long, value_name = "N", allow_negative_numbers = true)]
        top_n: Option<i32>,
        /// Instruction that says what makes a document relevant [default: the model's own]
        #[arg(long, value_name = "TEXT")]
        instruction: Option<String>,
    },
    /// Compute the log-probability of each token of a text
    Score {
        /// Name of the model
        name: String,
        /// The text; "-" reads it from the standard input, exactly as it comes
        #[arg(required_unless_present = "ids")]
        text: Option<String>,
        /// Token ids in place of a text, as in 1,15043
        #[arg(long, value_name = "LIST", value_delimiter = ',', conflicts_with_all = ["text", "no_add_special", "no_parse_special"])]
        ids: Vec<u32>,
        /// Also show the N most probable tokens at each place
        #[arg(long, value_name = "N", allow_negative_numbers = true)]
        top_n: Option<i32>,
        /// Context length in tokens
        #[arg(long, value_name = "N", allow_negative_numbers = true)]
        n_ctx: Option<i32>,
        #[command(flatten)]
        special: SpecialArgs,
    },
    /// Tokenize a text
    Tokenize {
        /// Name of the model
        name: String,
        /// The text; "-" reads it from the standard input, exactly as it comes
        text: String,
        #[command(flatten)]
        special: SpecialArgs,
    },
    /// Detokenize token ids
    Detokenize {
        /// Name of the model
        name: String,
        /// The ids
        #[arg(required = true)]
        ids: Vec<u32>,
    },
    /// Show or change the weight cache
    #[command(subcommand)]
    Cache(CacheCommand),
    /// Upload segments ahead of their use
    Preload(SegmentsArgs),
    /// Pin segments: exempt them from eviction
    Pin(SegmentsArgs),
    /// Unpin segments: allow their eviction
    Unpin(SegmentsArgs),
    /// Show the daemon: version, device, models, queue
    Status,
    /// Watch models, memory, uploads and requests; keys pin, preload, evict, unload, set the budget
    Top(TopArgs),
    /// Show where a request's time went: queue, uploads, passes, reader; and what would help
    Why(WhyArgs),
    /// List the GPU drivers and devices of the daemon's machine
    Devices {
        /// Run the self-test of the GPU in use, and print one table for a bug report
        #[arg(long)]
        check: bool,
    },
    /// Give GPU memory back and close the GPU until the next request, for a game or another program
    Release {
        /// Also give back host memory: KV cache, and weights that the CPU computes with
        #[arg(long)]
        host: bool,
    },
    /// Reload the daemon's configuration, and show which changes took effect
    Reload,
    /// List the GGUF files below the daemon's model directories
    Files,
    /// Check whether the daemon serves requests; the exit code is 0 if it does
    Health,
    /// Look for what this machine lacks to serve models, and say what to do; exit code 1 if
    /// something fails
    Doctor {
        /// Read /sys, /dev, /proc and /etc below this directory, and ask no daemon but that of
        /// --socket
        #[arg(long, value_name = "DIR")]
        root: Option<PathBuf>,
    },
    /// Print the names of the loaded models, a line each, for completions; nothing without a daemon
    #[command(hide = true)]
    Names,
    /// Write what a package ships beside the program: man pages, shell completions
    #[command(hide = true)]
    Generated {
        /// What to write
        #[arg(value_enum)]
        what: GeneratedFiles,
        /// Into this directory, which exists
        dir: PathBuf,
    },
}

#[derive(Debug, Args)]
pub(crate) struct LoadArgs {
    /// The GGUF file; where no such file is here, relative to the daemon's model
    /// directories
    pub(crate) file: PathBuf,
    /// Name to load it under [default: the file's name without .gguf]
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Pin all of its segments
    #[arg(long)]
    pub(crate) pin: bool,
    /// Upload as much of it as fits at once
    #[arg(long)]
    pub(crate) preload: bool,
    /// Draft model for speculative decoding: a smaller model with the same vocabulary
    #[arg(long, value_name = "NAME")]
    pub(crate) draft: Option<String>,
    /// Projector (mmproj) by which it reads images, a GGUF file [default: the one in the directory
    /// of the model that fits it]
    #[arg(long, value_name = "FILE")]
    pub(crate) mmproj: Option<PathBuf>,
    /// LoRA adapter that requests may have, a GGUF file, and its scale where they do not say
    /// otherwise [default: 1]; several times for several
    #[arg(long, value_name = "FILE[=SCALE]")]
    pub(crate) lora: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// The GGUF file
    pub(crate) file: PathBuf,
    /// What to say; "-" reads it from the standard input, without its last line
    /// break
    pub(crate) prompt: String,
    /// Image that the prompt shows, a PNG, JPEG, WebP or GIF file; several times for several
    #[arg(long = "image", value_name = "FILE")]
    pub(crate) images: Vec<PathBuf>,
    /// System message to begin with
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// Start a daemon for the occasion even if one is running
    #[arg(long)]
    pub(crate) private: bool,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
}

/// Options of a conversation beside its messages.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Conversation")]
pub(crate) struct ChatArgs {
    /// Image that the first message shows, a PNG, JPEG, WebP or GIF file; several times for several
    #[arg(long = "image", value_name = "FILE")]
    pub(crate) images: Vec<PathBuf>,
    /// System message to begin with
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// Tools that the model may call, a JSON list as in OpenAI's API; @FILE reads it
    /// from a file
    #[arg(long, value_name = "JSON", value_parser = text_or_file)]
    pub(crate) tools: Option<String>,
    /// More variables for the template, a JSON object, as in {"enable_thinking": false}
    #[arg(long, value_name = "JSON", value_parser = text_or_file)]
    pub(crate) template_args: Option<String>,
    /// Beginning of the response, which the model continues
    #[arg(long, value_name = "TEXT")]
    pub(crate) answer: Option<String>,
    /// Print the rendered prompt, and generate nothing
    #[arg(long)]
    pub(crate) render: bool,
    /// Print reasoning and tool calls unparsed, as the model writes them
    #[arg(long)]
    pub(crate) unparsed: bool,
}

#[derive(Debug, Args)]
pub(crate) struct SpecialArgs {
    /// Do not add special tokens (BOS, EOS) to the text
    #[arg(long)]
    pub(crate) no_add_special: bool,
    /// Tokenize the names of special tokens as plain text
    #[arg(long)]
    pub(crate) no_parse_special: bool,
}

#[derive(Debug, Args)]
pub(crate) struct SegmentsArgs {
    /// Name of the model
    pub(crate) name: String,
    /// Segment indexes as `show` lists them, as in 0,3-5 [default: all]
    #[arg(long, value_name = "LIST", value_parser = parse_segments)]
    pub(crate) segments: Option<Segments>,
}

impl SegmentsArgs {
    /// The indexes; empty for all.
    pub(crate) fn indexes(&self) -> &[u32] {
        self.segments.as_ref().map_or(&[], |list| &list.0)
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum CacheCommand {
    /// Show the use of device memory, cache hits and evictions
    Stats,
    /// Evict all weights, or those of one model; pinned and used segments stay
    Clear {
        /// Name of the model
        name: Option<String>,
        /// Also delete KV cache on disk: of the model, or all of it
        #[arg(long)]
        disk: bool,
    },
    /// Show the budget, or change it
    Budget {
        /// Bytes (2147483648), a size (2GiB, 1.5G, 512MiB; K, M, G, T count in
        /// 1024, KB, MB, GB, TB in 1000) or a share of the device (80%)
        budget: Option<Budget>,
    },
    /// Show or set the eviction policy
    Policy {
        /// The policy
        #[arg(value_enum)]
        policy: Option<Policy>,
    },
}

/// What is generated from the definition of the command line: man pages and completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum GeneratedFiles {
    /// A man page for the program and one for each command
    Man,
    /// Completions for bash, zsh and fish
    Completions,
}

/// Poolings by the names that users type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum PoolingArg {
    /// The mean of all tokens' states
    Mean,
    /// The first token's
    First,
    /// The last token's
    Last,
    /// Each token's own
    None,
}

impl From<PoolingArg> for Pooling {
    fn from(pooling: PoolingArg) -> Pooling {
        match pooling {
            PoolingArg::Mean => Pooling::Mean,
            PoolingArg::First => Pooling::First,
            PoolingArg::Last => Pooling::Last,
            PoolingArg::None => Pooling::None,
        }
    }
}

/// Policies by the names that users type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Policy {
    /// Evict the segment whose next use is expected last
    PassAware,
    /// Evict the least recently used segment
    Lru,
}

impl From<Policy> for CachePolicy {
    fn from(policy: Policy) -> CachePolicy {
        match policy {
            Policy::PassAware => CachePolicy::PassAware,
            Policy::Lru => CachePolicy::Lru,
        }
    }
}

/// Segment indexes, in ascending order, each once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Segments(Vec<u32>);

/// Highest segment index that a list may name, so that a range stays small.
const SEGMENT_INDEX_MAX: u32 = 1 << 20;

fn parse_segments(list: &str) -> Result<Segments, String> {
    let index = |text: &str| match text.trim().parse::<u32>() {
        Ok(index) if index <= SEGMENT_INDEX_MAX => Ok(index),
        _ => Err(format!(
            "{text:?} is not a segment index; write a list as in 0,3-5"
        )),
    };
    let mut indexes = Vec::new();
    for part in list.split(',') {
        match part.split_once('-') {
            None => indexes.push(index(part)?),
            Some((first, last)) => {
                let (first, last) = (index(first)?, index(last)?);
                if first > last {
                    return Err(format!("the range {part} runs backwards"));
                }
                indexes.extend(first..=last);
            }
        }
    }
    indexes.sort_unstable();
    indexes.dedup();
    Ok(Segments(indexes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(line.split_whitespace())?.checked()
    }

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn common_flags_work_before_and_after_the_command() {
        for line in [
            "rocmforgectl --json --socket /s ls",
            "rocmforgectl ls --json --socket /s",
        ] {
            let cli = parse(line).unwrap();
            assert!(cli.json);
            assert_eq!(cli.socket.as_deref(), Some("/s".as_ref()));
        }
    }

    #[test]
    fn load_takes_its_flags() {
        let cli = parse("rocmforgectl load m.gguf --name n --pin --preload").unwrap();
        let Command::Load(args) = cli.command else {
            panic!("{cli:?}")
        };
        assert_eq!(args.name.as_deref(), Some("n"));
        assert!(args.pin && args.preload);
    }

    #[test]
    fn a_prompt_may_be_a_dash() {
        let cli = parse("rocmforgectl generate tiny - --max-tokens 5").unwrap();
        let Command::Generate {
            prompt, sampling, ..
        } = cli.command
        else {
            panic!("{cli:?}")
        };
        assert_eq!(prompt.as_deref(), Some("-"));
        assert_eq!(sampling.params().max_tokens, Some(5));
    }

    #[test]
    fn usage_errors_exit_with_2() {
        for line in [
            "rocmforgectl",
            "rocmforgectl load",
            "rocmforgectl frobnicate",
            "rocmforgectl generate tiny",
            "rocmforgectl generate tiny x --max-tokens many",
            "rocmforgectl cache budget lots",
            "rocmforgectl cache policy belady",
            "rocmforgectl pin tiny --segments 5-3",
            "rocmforgectl --socket /s run m.gguf x --private",
        ] {
            let error = parse(line).expect_err(line);
            assert_eq!(error.exit_code(), 2, "{line}");
        }
    }

    #[test]
    fn segment_lists_are_sorted_and_unique() {
        assert_eq!(
            parse_segments("7,0,3-5,4"),
            Ok(Segments(vec![0, 3, 4, 5, 7]))
        );
        for bad in ["", "a", "1,", "-1", "3-", "0-99999999999", "0-4000000000"] {
            assert!(parse_segments(bad).is_err(), "{bad:?}");
        }
    }
}
